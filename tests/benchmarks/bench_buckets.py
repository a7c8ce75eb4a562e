"""What buckets save: steps of a small Llama on 4 local processes, message by message and in buckets of several sizes.

The plans of one kind are the same but for their buckets, and take turns, a step each, so that what else the machine
does falls on all of them alike.
"""

import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from timing import extent

import planner
from hardware_profiles.units import KIB, MIB
from planner.plan.file import save_plan
from planner.plan.plan import Plan
from planner.sharding.update import Buckets, Update
from planner.strategy_search.request.space import Pinned
from runtime.launch.launch import run_ranks

HERE = Path(__file__).resolve().parent
PROCESSES, GLOBAL_BATCH = 4, 16
ROUNDS = {"quick": 6, "usual": 15, "full": 40}
KINDS = {
    "data 4": Pinned(data=4, zero=0, micro_batches=1, recompute="none"),
    "data 4, ZeRO-1": Pinned(data=4, zero=1, micro_batches=1, recompute="none"),
    "data 4, ZeRO-1, 4 micro-batches": Pinned(data=4, zero=1, micro_batches=4, recompute="none"),
}
BUCKETS: dict[str, Buckets] = {"none": "none", "auto": "auto", "64 KiB": int(64 * KIB), "25 MiB": int(25 * MIB)}


def plans() -> Iterator[tuple[str, str, Plan]]:
    """Kind, buckets, plan."""
    for kind, pinned in KINDS.items():
        first = None
        for name, buckets in BUCKETS.items():
            found = planner.search(
                "llama-tiny", "cpu", devices=PROCESSES, global_batch=GLOBAL_BATCH, precision="fp32", pinned=pinned,
                update=Update(buckets=buckets),
            ).plan  # fmt: skip
            first = first or found  # the same choices throughout
            yield kind, name, replace(first, training=found.training, prediction=found.prediction)


def main() -> None:
    """Print predicted, median and fastest milliseconds."""
    rows = list(plans())
    measured: dict[str, list[float]] = {}

    def line(text: str) -> None:
        content = json.loads(text)
        if "plan" in content:
            measured[content["plan"]] = content["seconds"]

    with tempfile.TemporaryDirectory() as folder:
        for number, (_, _, plan) in enumerate(rows):
            save_plan(plan, Path(folder) / f"{number:02}.json")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        if run_ranks("calibration_runs", [folder, "--rounds", str(ROUNDS[extent()])], PROCESSES, line):
            raise SystemExit("the run failed")
    for number, (kind, name, plan) in enumerate(rows):
        seconds = measured[f"{number:02}"]
        print(
            f"{kind:32} {name:8} predicted {1e3 * plan.prediction.step_seconds:6.0f} ms"
            f"   median {1e3 * statistics.median(seconds):6.0f}   fastest {1e3 * min(seconds):6.0f}"
        )


if __name__ == "__main__":
    main()
