"""What the executor of plans costs over PyTorch by hand: the same model, the same cuts, on the same processes.

By hand is `parallelize_module` (column, row and sequence parallel, parallel loss), `fully_shard` of every layer, or
DistributedDataParallel; the plans are those that the planner writes where these degrees are asked for, with the weights
of a block gathered together, and gradients in buckets of the size that DistributedDataParallel takes. They may differ
in what nobody asked for (which tensor is gathered when), as a user would meet it. On a CPU with fewer cores than
processes the time on the wall is that of all their work, and other work on the machine falls on it; CPU seconds are
fairer then.

`--pairs=WORDS` takes only the pairs that have these words in their name.
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from timing import extent

import planner
from hardware_profiles import load_profile
from planner.plan.file import save_plan
from planner.plan.plan import Plan
from planner.strategy_search.request.space import Pinned
from runtime.processes.ranks import run_ranks

HERE = Path(__file__).resolve().parent
ROUNDS = {"quick": 5, "usual": 11, "full": 40}
SAME = 1e-4
"""Largest relative difference of two losses that are the same."""

SMALL = ("llama-tiny", 16)
GPT = ("gpt-tiny", 16)
WIDE = "+hidden_size=768+ffn_size=2048+num_heads=12+num_kv_heads=4+num_layers=4"
LARGE = (f"llama-tiny{WIDE}", 8)
"""Models, large ones so that nearly all is products of matrices, and samples of a step."""


@dataclass(frozen=True)
class Pair:
    """A plan and what is written by hand in its place, "parallel" for DTensor and `fully_shard`, or "ddp"."""

    words: str
    model: str
    batch: int
    processes: int
    tensor: int
    data: int
    by_hand: str = "parallel"
    plans: tuple[str, ...] = ("plan",)

    @property
    def pinned(self) -> Pinned:
        fixed = {"micro_batches": 1, "recompute": "none", "tensor": self.tensor, "data": self.data}
        zero = 3 if self.data > 1 and self.by_hand == "parallel" else 0
        return Pinned(**fixed, zero=zero, sequence_parallel=True if self.tensor > 1 else None)


PAIRS = (
    Pair("tensor 2 x data 2, ZeRO-3", *SMALL, 4, 2, 2),
    Pair("tensor 4", *SMALL, 4, 4, 1),
    Pair("ZeRO-3 over 4", *SMALL, 4, 1, 4),
    Pair("data 4 against DDP", *SMALL, 4, 1, 4, "ddp"),
    Pair("GPT, ZeRO-3 over 4", *GPT, 4, 1, 4),
    Pair("GPT, data 4 against DDP", *GPT, 4, 1, 4, "ddp"),
    Pair("tensor 2", *SMALL, 2, 2, 1),
    Pair("ZeRO-3 over 2", *SMALL, 2, 1, 2),
    Pair("data 2 against DDP", *SMALL, 2, 1, 2, "ddp"),
)
LARGER = (
    Pair("large, tensor 2", *LARGE, 2, 2, 1),
    Pair("large, ZeRO-3 over 2", *LARGE, 2, 1, 2),
    Pair("large, data 2 against DDP", *LARGE, 2, 1, 2, "ddp"),
)


def main() -> None:
    words = next((word.removeprefix("--pairs=") for word in sys.argv[1:] if word.startswith("--pairs=")), None)
    asked = PAIRS if extent() == "quick" and words is None else (*PAIRS, *LARGER)
    pairs = [pair for pair in asked if words is None or words in pair.words]
    if not pairs:
        raise SystemExit(f"no pair has {words!r} in its name; there are {', '.join(pair.words for pair in asked)}")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    print(f"on {os.cpu_count()} cores; medians of a step, of seconds on the wall and of CPU seconds of all processes,")
    print("± half of what lies between the quartiles")
    print(f"{'':28}{'':6}{'plan':>18}{'by hand':>18}{'ratio':>9}")
    for processes in sorted({pair.processes for pair in pairs}):
        together, lines = [pair for pair in pairs if pair.processes == processes], list[str]()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for number, pair in enumerate(together):
                save_plan(_plan(pair), folder / f"{number}.plan.json")
            (folder / "pairs").write_text(json.dumps([asdict(pair) for pair in together]), encoding="utf-8")
            run_ranks("overhead_runs", [name, "--rounds", str(ROUNDS[extent()])], processes, lines.append)
        for line in lines:
            found = json.loads(line)
            _print(together[found["pair"]], found)


def _plan(pair: Pair) -> Plan:
    buckets, together = planner.Update(buckets=25 * 2**20), planner.Update(gathers="block")
    update = buckets if pair.by_hand == "ddp" else together
    cluster = load_profile("cpu").with_devices(pair.processes)
    found = planner.search(
        pair.model, cluster, pinned=pair.pinned, precision="fp32", global_batch=pair.batch, update=update
    )
    return found.plan


def _print(pair: Pair, found: Mapping[str, Mapping[str, list[float]]]) -> None:
    both = zip(found["losses"]["plan"], found["losses"]["by hand"], strict=True)
    worst = max(abs(one - other) / other for one, other in both)
    if worst > SAME:
        raise SystemExit(f"{pair.words}: the losses differ by {worst:.1e}, allowed {SAME:.0e}")
    for kind in ("wall", "cpu"):
        ours, theirs = found[kind]["plan"], found[kind]["by hand"]
        ratio = statistics.median(ours) / statistics.median(theirs)
        name = pair.words if kind == "wall" else f"  losses equal to {worst:.1e}"
        print(f"{name:28}{kind:6}{_spread(ours):>18}{_spread(theirs):>18}{ratio:>9.2f}", flush=True)


def _spread(seconds: list[float]) -> str:
    """Median, and half of what lies between the quartiles."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return f"{middle:.3f} ± {(high - low) / 2:.3f}"


if __name__ == "__main__":
    main()
