"""What a step costs under the settings that a user gets who gives none, over PyTorch by hand: data parallelism against
DistributedDataParallel, and tensor 2 x data 2 with ZeRO-1 against tensor parallelism in the MLP alone, as DTensors with
FSDP and as plain tensors with DistributedDataParallel and ZeroRedundancyOptimizer.

    each alone   gradients and new weights one by one (`--buckets none`)
    default      as a plan is that is told nothing beside its degrees
    MLP alone    on the same mesh, products outside of the MLP computed whole, as those by hand have it

Tokens per second of the wall, medians of a step; and CPU seconds of a step of all processes, with the median of what a
step takes over the one by hand beside it. Other work on the machine falls on the wall, and hardly on that ratio.

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
from typing import Any

from timing import extent

import planner
from hardware_profiles import load_profile
from planner.plan.file import save_plan
from planner.plan.plan import Plan
from planner.strategy_search.request.request import Shard
from planner.strategy_search.request.space import Pinned
from runtime.processes.ranks import run_ranks

HERE = Path(__file__).resolve().parent
ROUNDS = {"quick": 6, "usual": 15, "full": 40}
SAME = 1e-4
"""Largest relative difference of two losses that are the same."""

EACH, DEFAULT, MLP = "each alone", "default", "MLP alone"
_WHOLE, _CUT_ROWS, _CUT_COLUMNS = ("batch", "-"), ("batch", "o"), ("batch", "i")
_MLP_ALONE = (
    *(Shard(pattern=pattern, strategy=_WHOLE) for pattern in ("*embed_tokens/embedding", "*_attn*_proj*", "lm_head*")),
    *(Shard(pattern=pattern, strategy=_CUT_ROWS) for pattern in ("*gate_proj*", "*up_proj*")),
    Shard(pattern="*down_proj*", strategy=_CUT_COLUMNS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Plans of the same degrees, and what is written by hand in their place."""

    words: str
    model: str
    batch: int
    tensor: int
    data: int
    zero: int
    by_hand: str
    plans: tuple[str, ...]

    @property
    def processes(self) -> int:
        return self.tensor * self.data


_REPLICAS = {"tensor": 1, "zero": 0, "by_hand": "ddp", "plans": (EACH, DEFAULT)}
_CUT = {"model": "llama-tiny", "batch": 8, "tensor": 2, "data": 2, "zero": 1, "plans": (EACH, DEFAULT, MLP)}
PAIRS = (
    Pair(words="GPT, data 2", model="gpt-tiny", batch=4, data=2, **_REPLICAS),
    Pair(words="Llama, data 2", model="llama-tiny", batch=4, data=2, **_REPLICAS),
    Pair(words="GPT, data 4", model="gpt-tiny", batch=8, data=4, **_REPLICAS),
    Pair(words="Llama, data 4", model="llama-tiny", batch=8, data=4, **_REPLICAS),
    Pair(words="tensor 2 x data 2, ZeRO-1: FSDP", by_hand="mlp", **_CUT),
    Pair(words="tensor 2 x data 2, ZeRO-1: DDP", by_hand="local", **_CUT),
)


def main() -> None:
    words = next((word.removeprefix("--pairs=") for word in sys.argv[1:] if word.startswith("--pairs=")), "")
    pairs = [pair for pair in PAIRS if words in pair.words]
    if not pairs:
        raise SystemExit(f"no pair has {words!r} in its name; there are {', '.join(pair.words for pair in PAIRS)}")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    print(f"on {os.cpu_count()} cores; medians of a step; CPU seconds are those of all processes")
    print(f"{'':46}{'tokens/s':>10}{'CPU s':>10}{'over by hand':>20}")
    for processes in sorted({pair.processes for pair in pairs}):
        together, lines = [pair for pair in pairs if pair.processes == processes], list[str]()
        with tempfile.TemporaryDirectory() as name:
            folder, tokens = Path(name), {}
            for number, pair in enumerate(together):
                for who in pair.plans:
                    plan = _plan(pair, who)
                    save_plan(plan, folder / f"{number}.{who}.json")
                tokens[number] = pair.batch * (plan.model.sequence_length or 128)
            (folder / "pairs").write_text(json.dumps([asdict(pair) for pair in together]), encoding="utf-8")
            run_ranks("overhead_runs", [name, "--rounds", str(ROUNDS[extent()])], processes, lines.append)
        for line in lines:
            found = json.loads(line)
            _print(together[found["pair"]], found, tokens[found["pair"]])


def _plan(pair: Pair, who: str) -> Plan:
    given: dict[str, Any] = {"tensor": pair.tensor, "data": pair.data, "zero": pair.zero}
    shards: tuple[Shard, ...] = ()
    if who == MLP:
        given, shards = {"mesh": (pair.data, pair.tensor), "pipeline": 1}, _MLP_ALONE
    return planner.search(
        pair.model,
        load_profile("cpu").with_devices(pair.processes),
        pinned=Pinned(micro_batches=1, recompute="none", **given),
        shard=shards,
        precision="fp32",
        global_batch=pair.batch,
        update=planner.Update(buckets="none") if who == EACH else planner.Update(),
    ).plan


def _print(pair: Pair, found: Mapping[str, Mapping[str, list[float]]], tokens: int) -> None:
    losses = found["losses"]
    for who in pair.plans:
        both = zip(losses[who], losses["by hand"], strict=True)
        worst = max(abs(one - other) / other for one, other in both)
        if worst > SAME:
            raise SystemExit(f"{pair.words}, {who}: the losses differ by {worst:.1e}, allowed {SAME:.0e}")
    for who, seconds in found["cpu"].items():
        ratios = [one / other for one, other in zip(seconds, found["cpu"]["by hand"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rate = tokens / statistics.median(found["wall"][who])
        print(
            f"{pair.words:34}{who:12}{rate:>10,.0f}{statistics.median(seconds):>10.3f}"
            f"{f'{middle:.2f} ± {(high - low) / 2:.2f}':>20}",
            flush=True,
        )


if __name__ == "__main__":
    main()
