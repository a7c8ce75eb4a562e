"""What micro-batches that take turns hide: steps of a small Llama on 2 local processes with a slow link between them.

The same micro-batches, tensor parallel, one at a time and two at a time: of two, one computes while what the other has
sent is on its way. The link is as slow as is said (`throttle`), so that there is something to hide; without that,
nothing is gained on processes that share cores. Plans take turns, a step each.
"""

import json
import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from timing import extent

import planner
from planner.plan.file import save_plan
from planner.strategy_search.request.space import Pinned
from runtime.launch.launch import run_ranks

HERE = Path(__file__).resolve().parent
PROCESSES, GLOBAL_BATCH, MICRO_BATCHES = 2, 16, 4
ROUNDS = {"quick": 6, "usual": 12, "full": 30}
LINKS = {"as it is": 0.0, "200 MB/s": 200e6, "100 MB/s": 100e6, "50 MB/s": 50e6}


def main() -> None:
    """Print median milliseconds of a step."""
    pinned = Pinned(tensor=PROCESSES, micro_batches=MICRO_BATCHES, recompute="none")
    plan = planner.search(
        "llama-tiny", "cpu", devices=PROCESSES, global_batch=GLOBAL_BATCH, precision="fp32", pinned=pinned
    ).plan
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"llama-tiny, tensor {PROCESSES}, {MICRO_BATCHES} micro-batches, {PROCESSES} processes; median of a step, ms")
    print(f"{'link':12}{'one at a time':>16}{'two at a time':>16}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for interleave in (1, 2):
            training = replace(plan.training, interleave=interleave)
            save_plan(replace(plan, training=training), Path(folder) / f"{interleave}.json")
        for link, bandwidth in LINKS.items():
            one, two = measured(folder, bandwidth)
            print(f"{link:12}{1e3 * one:>16.0f}{1e3 * two:>16.0f}{two / one:>8.2f}")


def measured(folder: str, bandwidth: float) -> tuple[float, float]:
    """Median seconds of a step with one micro-batch at a time, and with two."""
    found: dict[str, list[float]] = {}

    def line(text: str) -> None:
        content = json.loads(text)
        if "plan" in content:
            found[content["plan"]] = content["seconds"]

    arguments = [folder, "--rounds", str(ROUNDS[extent()]), "--bandwidth", str(bandwidth)]
    if run_ranks("calibration_runs", arguments, PROCESSES, line):
        raise SystemExit("the run failed")
    return statistics.median(found["1"]), statistics.median(found["2"])


if __name__ == "__main__":
    main()
