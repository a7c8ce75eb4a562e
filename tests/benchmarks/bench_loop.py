"""The loop closed on this machine: what a plan takes, foretold by the packaged profile and by one that a run corrected.

    plan 0 ─ run --measure ─▶ record ─ fit ─▶ corrected profile
    plans 1 ...  each another way to use two processes: predicted by both profiles, then run and measured

The speed of a shared machine drifts from minute to minute by more than what is asked of predictions. So the plans are
run in turn, some rounds, and of each the run counts whose step is the shortest; that of plan 0 makes the corrections.

`wall` is the step by the clock, of which `waiting` is the share in which ranks wait in a collective for one that comes
later. `CPU` is the step with CPU seconds where processes compute, and without waiting for one that stood in line: what
it takes on a machine that nobody else uses, as far as this one can say. Both come from the same runs. The corrected
profile is made of plan 0 alone, once by each clock, and of nothing that is measured afterwards.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hardware_profiles import Machine, load_software
from hardware_profiles.corrections import corrected_profile
from hardware_profiles.load import load_profile
from hardware_profiles.run_record import MeasuredRun, load_run_record
from planner.api.searching import search
from planner.graph.operator_graph import OperatorGraph
from planner.plan.compare.corrections import corrections_of, factors_of, spread
from planner.plan.compare.measured import Clock, measured_terms
from planner.plan.compare.repricing import repriced
from planner.plan.file import save_plan
from planner.plan.plan import Plan
from planner.strategy_search.job import named_job
from planner.strategy_search.request.space import Pinned

MODEL = "llama-tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A way to train the model on two processes."""

    name: str
    pinned: Pinned
    batch: int = 16


CASES = (
    Case(name="data 2", pinned=Pinned(data=2, tensor=1, zero=0, micro_batch=4)),
    Case(name="data 2, ZeRO 1", pinned=Pinned(data=2, tensor=1, zero=1, micro_batch=4)),
    Case(name="data 2, ZeRO 3", pinned=Pinned(data=2, tensor=1, zero=3, micro_batch=4)),
    Case(name="data 2, recomputed", pinned=Pinned(data=2, tensor=1, zero=0, micro_batch=4, recompute="full")),
    Case(name="data 2, batch 32", pinned=Pinned(data=2, tensor=1, zero=0, micro_batch=8), batch=32),
    Case(name="data 2, micro-batch 1", pinned=Pinned(data=2, tensor=1, zero=0, micro_batch=1)),
    Case(name="tensor 2", pinned=Pinned(data=1, tensor=2, micro_batch=8)),
    Case(name="tensor 2, sequence", pinned=Pinned(data=1, tensor=2, micro_batch=8, sequence_parallel=True)),
    Case(name="pipeline 2", pinned=Pinned(pipeline=2, data=1, tensor=1, micro_batch=2)),
    Case(name="pipeline 2, recomputed", pinned=Pinned(pipeline=2, data=1, tensor=1, micro_batch=2, recompute="full")),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--extent", choices=("quick", "usual", "full"), default="usual")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hardware", default="cpu", help="the profile before")
    asked = parser.parse_args()
    cases = CASES[:3] if asked.extent == "quick" else CASES
    with tempfile.TemporaryDirectory() as folder:
        loop(Path(folder), cases, asked.steps, asked.rounds, asked.hardware)


def loop(folder: Path, cases: Sequence[Case], steps: int, rounds: int, hardware: str) -> None:
    """Run the cases, and print the errors before and after."""
    before: Machine = load_profile(hardware).with_software(load_software("pytorch")).with_devices(2)
    graph, batch = traced(before)
    plans = [
        search(MODEL, before, devices=2, global_batch=case.batch, pinned=case.pinned, simplicity=0.0).plan
        for case in cases
    ]
    taken = [[measured(plan, folder, number, steps) for number, plan in enumerate(plans)] for _ in range(rounds)]
    runs = [min(of_one, key=step_of) for of_one in zip(*taken, strict=True)]
    print("error of the step by the clock, and by CPU seconds where processes compute")
    machines = {clock: corrected(runs[0], clock, hardware, folder) for clock in ("wall", "cpu")}
    heads = ("measured", "waiting", "before", "after", "CPU", "before", "after")
    print(f"{'plan':24s} " + " ".join(f"{head:>8s}" for head in heads))
    errors: dict[tuple[str, str], list[float]] = {}
    for case, plan, run in zip(cases, plans, runs, strict=True):
        cells = []
        for clock, machine in machines.items():
            terms = measured_terms(run, clock)
            found = sum(terms.values())
            cells.append(f"{found * 1e3:5.0f} ms")
            if clock == "wall":
                cells.append(f"{terms['waiting'] / found:8.1%}")
            later = repriced(plan, graph, batch, machine).plan
            for when, priced in (("before", plan), ("after", later)):
                error = priced.prediction.step_seconds / found - 1
                cells.append(f"{error:+8.1%}")
                if run is not runs[0]:
                    errors.setdefault((clock, when), []).append(abs(error))
        print(f"{case.name:24s} " + " ".join(cells))
    means = {key: statistics.fmean(found) for key, found in errors.items()}
    print(
        f"mean error of the {len(cases) - 1} other plans: "
        + ", ".join(f"{c} {w} {e:.1%}" for (c, w), e in means.items())
    )
    drift = statistics.median(
        max(steps) / min(steps) - 1 for steps in (list(map(step_of, of)) for of in zip(*taken, strict=True))
    )
    print(
        f"the slowest of {rounds} runs of a plan takes {drift:.0%} longer than the fastest, in the median of the plans"
    )
    half = statistics.median(spread(run) for run in runs)
    print(f"the middle half of the steps of a run lies within {half:.0%} of its median, in the median of the runs")


def traced(machine: Machine) -> tuple[OperatorGraph, int]:
    """The graph of the model and the samples of its example inputs."""
    from planner.graph.trace import trace

    job = named_job(MODEL, machine, lambda model: trace(model.module, model.args, model.kwargs))
    return job.graph, job.batch


def measured(plan: Plan, folder: Path, number: int, steps: int) -> MeasuredRun:
    """A run of a plan."""
    place, record = folder / f"{number}.json", folder / f"{number}.run.json"
    save_plan(plan, place)
    words = ["run", str(place), "--steps", str(steps), "--no-check", "--measure", str(record)]
    subprocess.run([sys.executable, "-m", "planner.cli.main", *words], check=True, stdout=subprocess.DEVNULL)
    return load_run_record(record)


def corrected(run: MeasuredRun, clock: Clock, hardware: str, folder: Path) -> Machine:
    """The profile as a run corrects it."""
    factors = factors_of([run], clock)
    print(f"by {clock}: " + ", ".join(f"{one.name} x {one.value or 1:.3g}" for one in factors))
    path = folder / f"{clock}.toml"
    path.write_text(
        corrected_profile(hardware, corrections_of([run], factors, clock), clock, "a loop"), encoding="utf-8"
    )
    return load_profile(path).with_software(load_software("pytorch")).with_devices(2)


def step_of(run: MeasuredRun) -> float:
    """Seconds of a step by the clock."""
    return sum(measured_terms(run).values())


if __name__ == "__main__":
    main()
