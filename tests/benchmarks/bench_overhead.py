"""What the executor of plans costs over PyTorch by hand: the same model, the same cuts, on the same four processes.

By hand is `parallelize_module` (column, row and sequence parallel, parallel loss) and `fully_shard`; the plans are
those that the planner writes where these degrees are asked for. They may differ in what nobody asked for (which
tensor is gathered when), as a user would meet it. On a CPU with fewer cores than processes the time on the
wall is that of all their work, and other work on the machine falls on it; CPU seconds are fairer then.
"""

import json
import os
import statistics
import tempfile
from pathlib import Path

from timing import extent

import planner
from hardware_profiles import load_profile
from planner.plan.file import save_plan
from planner.search.space import Pinned
from runtime.ranks import run_ranks

HERE = Path(__file__).resolve().parent
MODEL, GLOBAL_BATCH, PROCESSES = "llama-tiny", 16, 4
ROUNDS = {"quick": 5, "usual": 15, "full": 40}
SAME = 1e-4
"""Largest relative difference of two losses that are the same."""

TOGETHER = planner.Update(gathers="block")
"""As `fully_shard` of every layer does it."""

PAIRS = {
    "2-2": ("tensor 2 x data 2, ZeRO-3", Pinned(tensor=2, data=2, zero=3, micro_batches=1, recompute="none")),
    "4-1": ("tensor 4", Pinned(tensor=4, micro_batches=1, recompute="none", sequence_parallel=True)),
    "1-4": ("ZeRO-3 over 4", Pinned(data=4, zero=3, micro_batches=1, recompute="none")),
}
"""Tensor and data degree to what is compared."""


def main() -> None:
    lines: list[str] = []
    cluster = load_profile("cpu").with_devices(PROCESSES)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for degrees, (_, pinned) in PAIRS.items():
            asked = {"pinned": pinned, "precision": "fp32", "global_batch": GLOBAL_BATCH, "update": TOGETHER}
            found = planner.search(MODEL, cluster, **asked)
            save_plan(found.plan, folder / f"{degrees}.json")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        run_ranks("overhead_runs", [name, "--rounds", str(ROUNDS[extent()])], PROCESSES, lines.append)
    print(f"{MODEL}, batch {GLOBAL_BATCH}, {PROCESSES} processes on {os.cpu_count()} cores; medians of a step, of")
    print("seconds on the wall and of CPU seconds of all processes, ± half of what lies between the quartiles")
    print(f"{'':28}{'':6}{'plan':>18}{'by hand':>18}{'ratio':>9}")
    for line in lines:
        found = json.loads(line)
        pairs = zip(found["losses"]["plan"], found["losses"]["by hand"], strict=True)
        worst = max(abs(one - other) / other for one, other in pairs)
        if worst > SAME:
            raise SystemExit(f"{found['pair']}: the losses differ by {worst:.1e}, allowed {SAME:.0e}")
        for kind in ("wall", "cpu"):
            ours, theirs = found[kind]["plan"], found[kind]["by hand"]
            ratio = statistics.median(ours) / statistics.median(theirs)
            name = PAIRS[found["pair"]][0] if kind == "wall" else f"  losses equal to {worst:.1e}"
            print(f"{name:28}{kind:6}{_spread(ours):>18}{_spread(theirs):>18}{ratio:>9.2f}")


def _spread(seconds: list[float]) -> str:
    """Median, and half of what lies between the quartiles."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return f"{middle:.3f} ± {(high - low) / 2:.3f}"


if __name__ == "__main__":
    main()
