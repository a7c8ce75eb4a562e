"""Our plans beside the best that Calculon found (commit caa4b11, system a100_80g, overlap on): its exhaustive search
over the settings of Megatron.

    theirs   seconds of a step of its best plan, as its model has it
    ours     of our best plan by default, as ours has it, and its gap

They differ in the space and in the cost model: docs/search.md has what its model says of our plans. `--extent=quick`
takes the smallest problem, "usual" all for Megatron, "full" for our runtime, too. `--markdown` prints a table.
"""

import sys
from dataclasses import dataclass

from timing import cpu_seconds, extent

from planner.api.searching import search
from planner.errors import PlannerError
from planner.plan.layout.roles import roles
from planner.strategy_search.result import SearchResult


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model, so many devices and samples, and the seconds of the best plan of Calculon."""

    name: str
    model: str
    devices: int
    batch: int
    seconds: float


PROBLEMS = (
    Problem(
        name="22B",
        model="gpt3-175b+num_layers=48+hidden_size=6144+num_heads=64+vocab_size=51200",
        devices=8,
        batch=8,
        seconds=1.369,
    ),
    Problem(name="175B", model="gpt3-175b+vocab_size=51200", devices=512, batch=512, seconds=9.56),
    Problem(
        name="1T",
        model="gpt3-175b+num_layers=128+hidden_size=25600+num_heads=160+vocab_size=51200",
        devices=512,
        batch=512,
        seconds=51.97,
    ),
)


def main() -> None:
    """Print our step, gap and CPU seconds beside theirs."""
    problems = PROBLEMS[:1] if extent() == "quick" else PROBLEMS
    stacks = ("megatron", None) if extent() == "full" else ("megatron",)
    line = "{:<22}{:<10}{:>9}{:>9}{:>9}{:>7}{:>8}  {}"
    if "--markdown" in sys.argv:
        line = "| {} | {} | {} | {} | {} | {} | {} | {} |"
    print(line.format("problem", "software", "theirs", "ours", "more", "gap", "CPU s", "plan"))
    if "--markdown" in sys.argv:
        print("|---" * 8 + "|")
    for problem in problems:
        for software in stacks:
            try:
                seconds, found = cpu_seconds(lambda: searched(problem, software))  # noqa: B023
            except PlannerError as error:
                print(f"{problem.name}: {error}", flush=True)
                continue
            step = found.plan.prediction.step_seconds
            print(
                line.format(
                    f"{problem.name} on {problem.devices}",
                    software or "pytorch",
                    f"{problem.seconds:g} s",
                    f"{step:.4g} s",
                    f"{step / problem.seconds - 1:+.1%}",
                    f"{found.gap:.1%}",
                    f"{seconds:.1f}",
                    _words(found),
                ),
                flush=True,
            )


def searched(problem: Problem, software: str | None) -> SearchResult:
    """The best plan by default for the software of a stack, or for our runtime."""
    machine = {"hardware": "a100-80gb", "devices": problem.devices, "software": software}
    return search(problem.model, **machine, global_batch=problem.batch, simplicity=0.0)


def _words(found: SearchResult) -> str:
    plan, degrees = found.plan, roles(found.bound)
    parts = (("tensor", degrees.tensor), ("pipeline", plan.pipeline), ("virtual", plan.virtual_stages))
    many = [f"{name} {degree}" for name, degree in (*parts, ("data", degrees.data)) if degree > 1]
    return ", ".join([*many, f"{plan.training.micro_batches} micro-batches", plan.schedule])


if __name__ == "__main__":
    main()
