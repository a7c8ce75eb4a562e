"""How far the heuristics are from the exact answer, and what they save: plans of `planner.search` with each of them."""

from functools import partial

from timing import cpu_seconds, extent

from planner.api.searching import search
from planner.errors import PlannerError
from planner.graph.trace import trace
from planner.models.zoo import build_model

EXACT = "dynamic_programming"
HEURISTICS = ("recursive_programming",)  # sharding_propagation starts from what the user decides, here nothing
JOBS = (
    ("gpt2", 8, "a100-80gb"),
    ("gpt3-6.7b", 64, "a100-80gb"),
    ("gpt3-175b", 512, "a100-80gb"),
    ("llama2-7b", 16, "ascend-910b-64gb"),
    ("llama8b", 8, "h100-80gb"),
    ("llama8b", 256, "h100-80gb"),
    ("llama70b", 64, "h100-80gb"),
    ("llama405b", 1024, "h100-80gb"),
)


def main() -> None:
    """Print a line for every job and heuristic. The gap is how much slower its plan is, by the planner's estimate."""
    print(f"{'model':<12}{'devices':>8}  {'algorithm':<24}{'CPU s':>8}{'step s':>10}{'slower':>9}")
    gaps: dict[str, list[float]] = {name: [] for name in HEURISTICS}
    for model, devices, profile in JOBS[::3] if extent() == "quick" else JOBS:
        built = build_model(model, dtype="bfloat16")
        graph = trace(built.module, built.args, built.kwargs)
        work = partial(search, graph, profile, devices=devices, batch=built.batch, simplicity=0.0)
        exact = 0.0
        for name in (EXACT, *HEURISTICS):
            line = f"{model:<12}{devices:>8}  {name:<24}"
            try:
                seconds, found = cpu_seconds(partial(work, search=name))
            except PlannerError as error:
                print(f"{line}not available: {error}")
                continue
            step = found.plans[0].seconds
            if name == EXACT:
                exact = step
            else:
                gaps[name].append(step / exact - 1)
            slower = "" if name == EXACT else f"{gaps[name][-1]:>9.2%}"
            print(f"{line}{seconds:>8.2f}{step:>10.4f}{slower}", flush=True)
    for name, all_gaps in gaps.items():
        if all_gaps:
            print(f"{name}: {sum(all_gaps) / len(all_gaps):.2%} slower on average, {max(all_gaps):.2%} at most")


if __name__ == "__main__":
    main()
