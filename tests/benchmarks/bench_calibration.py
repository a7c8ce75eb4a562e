"""Do predictions with a calibrated profile put plans in the order of their measured step times? On this machine, with
four processes and with two: calibrate, make plans of every kind, run them all, and compare.

Writes docs/calibration-cpu.md with `--write`. `--measurements FOLDER` keeps the measured times of the calibration there
and uses those that it finds.
"""

import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from timing import extent

import planner
from costmodels.fit_machine import FittedMachine, fit_machine
from hardware_profiles import load_measurements
from planner.plan.file import save_plan
from planner.plan.plan import Plan
from planner.strategy_search.request.space import Pinned
from runtime.processes.ranks import run_ranks
from runtime.profiling.measuring import measure

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE.parents[1] / "docs" / "calibration-cpu.md"
MODEL, GLOBAL_BATCH = "llama-tiny", 16
EFFORT = {"quick": "quick", "usual": "quick", "full": "usual"}
ROUNDS = {"quick": 3, "usual": 6, "full": 15}

PLANS: dict[int, dict[str, Pinned]] = {
    4: {
        "data 4": Pinned(data=4, zero=0, micro_batches=1, recompute="none"),
        "data 4, ZeRO-1": Pinned(data=4, zero=1, micro_batches=1, recompute="none"),
        "data 4, ZeRO-2, 4 micro-batches": Pinned(data=4, zero=2, micro_batches=4, recompute="none"),
        "data 4, ZeRO-3": Pinned(data=4, zero=3, micro_batches=1, recompute="none"),
        "data 4, 4 micro-batches": Pinned(data=4, zero=0, micro_batches=4, recompute="none"),
        "data 4, recompute": Pinned(data=4, zero=0, micro_batches=1, recompute="full"),
        "data 2, tensor 2": Pinned(data=2, tensor=2, zero=0, micro_batches=1, recompute="none"),
        "data 2, tensor 2, ZeRO-1": Pinned(data=2, tensor=2, zero=1, micro_batches=2, recompute="none"),
        "tensor 4": Pinned(tensor=4, micro_batches=1, recompute="none", sequence_parallel=False),
        "tensor 4, 8 micro-batches": Pinned(tensor=4, micro_batches=8, recompute="none", sequence_parallel=False),
        "tensor 4, recompute": Pinned(tensor=4, micro_batches=1, recompute="full", sequence_parallel=False),
        "pipeline 2, data 2, 4 micro-batches": Pinned(pipeline=2, data=2, zero=0, micro_batches=4, recompute="none"),
        "pipeline 2, data 2, recompute": Pinned(pipeline=2, data=2, zero=0, micro_batches=4, recompute="full"),
        "pipeline 2, tensor 2, 4 micro-batches": Pinned(pipeline=2, tensor=2, micro_batches=4, recompute="none"),
        "pipeline 4, 2 micro-batches": Pinned(pipeline=4, data=1, micro_batches=2, recompute="none"),
        "pipeline 4, 8 micro-batches": Pinned(pipeline=4, data=1, micro_batches=8, recompute="none"),
    },
    2: {
        "data 2": Pinned(data=2, zero=0, micro_batches=1, recompute="none"),
        "data 2, ZeRO-1": Pinned(data=2, zero=1, micro_batches=1, recompute="none"),
        "data 2, ZeRO-2, 4 micro-batches": Pinned(data=2, zero=2, micro_batches=4, recompute="none"),
        "data 2, ZeRO-3": Pinned(data=2, zero=3, micro_batches=1, recompute="none"),
        "data 2, ZeRO-3, 8 micro-batches": Pinned(data=2, zero=3, micro_batches=8, recompute="none"),
        "data 2, 4 micro-batches": Pinned(data=2, zero=0, micro_batches=4, recompute="none"),
        "data 2, recompute": Pinned(data=2, zero=0, micro_batches=1, recompute="full"),
        "tensor 2": Pinned(tensor=2, micro_batches=1, recompute="none", sequence_parallel=False),
        "tensor 2, 8 micro-batches": Pinned(tensor=2, micro_batches=8, recompute="none", sequence_parallel=False),
        "tensor 2, recompute": Pinned(tensor=2, micro_batches=1, recompute="full", sequence_parallel=False),
        "pipeline 2, 1 micro-batch": Pinned(pipeline=2, data=1, micro_batches=1, recompute="none"),
        "pipeline 2, 2 micro-batches": Pinned(pipeline=2, data=1, micro_batches=2, recompute="none"),
        "pipeline 2, 8 micro-batches": Pinned(pipeline=2, data=1, micro_batches=8, recompute="none"),
        "pipeline 2, recompute": Pinned(pipeline=2, data=1, micro_batches=4, recompute="full"),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan, and the seconds of its step: predicted, the median of those measured, and the least of them."""

    name: str
    predicted: float
    measured: float
    fastest: float


def kendall(rows: list[Row], measured: Callable[[Row], float] = lambda row: row.measured) -> float:
    """Kendall's tau: pairs in the same order less pairs in the other one, over all pairs."""
    agreeing = [
        1 if (one.predicted - other.predicted) * (measured(one) - measured(other)) > 0 else -1
        for place, one in enumerate(rows)
        for other in rows[:place]
    ]
    return sum(agreeing) / len(agreeing)


def kendall_apart(rows: list[Row], ratio: float = 1.2) -> float:
    """Kendall's tau over the pairs whose measured medians are that far apart."""
    pairs = [(one, other) for one in rows for other in rows if one.measured > ratio * other.measured]
    return sum(1 if one.predicted > other.predicted else -1 for one, other in pairs) / max(1, len(pairs))


def option(name: str) -> str | None:
    """The value of `--name=value` among the arguments."""
    found = [word.partition("=")[2] for word in sys.argv[1:] if word.startswith(f"--{name}=")]
    return found[-1] if found else None


def calibrated(folder: Path, processes: int) -> FittedMachine:
    path = folder / f"measurements-{processes}.json"
    if not path.exists() and measure(path, processes, effort=EFFORT[extent()], on_line=lambda _: None):
        raise SystemExit("the calibration failed")
    return fit_machine(load_measurements(path))


def compare(machine: FittedMachine, processes: int) -> list[Row]:
    """Predict and run every plan."""
    cluster = machine.cluster.with_devices(processes)
    plans: dict[str, Plan] = {}
    for name, pinned in PLANS[processes].items():
        found = planner.search(MODEL, cluster, pinned=pinned, precision="fp32", global_batch=GLOBAL_BATCH)
        plans[name] = found.plan
    names = {f"plan{number:02}": name for number, name in enumerate(plans)}
    measured: dict[str, list[float]] = {}

    def line(text: str) -> None:
        content = json.loads(text)
        if "plan" in content:
            measured[names[content["plan"]]] = content["seconds"]

    with tempfile.TemporaryDirectory() as folder:
        for stem, name in names.items():
            save_plan(plans[name], Path(folder) / f"{stem}.json")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        if run_ranks("calibration_runs", [folder, "--rounds", str(ROUNDS[extent()])], processes, line):
            raise SystemExit("the run failed")
    return [
        Row(
            name=name,
            predicted=plan.prediction.step_seconds,
            measured=statistics.median(measured[name]),
            fastest=min(measured[name]),
        )
        for name, plan in plans.items()
    ]


def table(rows: list[Row]) -> list[str]:
    """Markdown, fastest measured first."""
    lines = ["| plan | predicted ms | median ms | fastest ms | predicted / median |", "|---|---:|---:|---:|---:|"]
    for row in sorted(rows, key=lambda row: row.measured):
        ratio = row.predicted / row.measured
        median, fastest = f"{1e3 * row.measured:.0f}", f"{1e3 * row.fastest:.0f}"
        lines.append(f"| {row.name} | {1e3 * row.predicted:.0f} | {median} | {fastest} | {ratio:.2f} |")
    return lines


def main() -> None:
    """Print the tables; `--write` writes them down."""
    folder = Path(option("measurements") or tempfile.mkdtemp(prefix="calibration-"))
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for processes in PLANS:
        machine = calibrated(folder, processes)
        rows = compare(machine, processes)
        measurements = load_measurements(folder / f"measurements-{processes}.json")
        busy = [row for row in rows if not row.name.startswith("pipeline")]
        ratios = [row.predicted / row.measured for row in rows]
        lines += [
            "", f"## {processes} processes", "",
            f"Calibrated: {measurements.source}. Median of {ROUNDS[extent()]} steps of each plan, in turns.", "",
            f"**Kendall's tau {kendall(rows):.2f}** over {len(rows)} plans ({kendall(busy):.2f} over the {len(busy)}"
            f" without a pipeline; {kendall(rows, lambda row: row.fastest):.2f} against the fastest step of each;"
            f" {kendall_apart(rows):.2f} over the pairs whose medians are more than 20 percent apart);"
            " predicted over measured is"
            f" {statistics.median(ratios):.2f} in the median, {min(ratios):.2f} to {max(ratios):.2f}.", "",
            *table(rows), "", "Residuals of the fit (mean absolute percentage error):", "",
            ", ".join(f"{one.what} {one.error:.0%}" for one in machine.residuals) + ".",
        ]  # fmt: skip
    head = [
        f"{MODEL} in fp32, global batch {GLOBAL_BATCH}, on {os.cpu_count()} cores; PyTorch {torch.__version__}, Python"
        f" {platform.python_version()}.",
    ]
    print("\n".join([*head, *lines]))
    if "--write" in sys.argv:
        known = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else "# Calibration on a CPU\n\n"
        before, _, _ = known.partition(MARK)
        DOCUMENT.write_text(before + "\n".join([MARK, "", *head, *lines]) + "\n", encoding="utf-8")


MARK = "<!-- written by tests/benchmarks/bench_calibration.py --write; what stands above is not -->"

if __name__ == "__main__":
    main()
