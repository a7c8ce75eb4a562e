"""What a step costs under the settings that a user gets who gives none, over PyTorch by hand: data parallelism against
DistributedDataParallel, and tensor 2 x data 2 with ZeRO-1 against tensor parallelism in the MLP alone under FSDP.

    each alone   gradients and new weights one by one (`--buckets none`)
    default      as a plan is that is told nothing beside its degrees
    MLP alone    the same degrees, every operator outside of the MLP computed whole, as the one by hand has it

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
from planner.search.space import Pinned
from runtime.ranks import run_ranks

HERE = Path(__file__).resolve().parent
ROUNDS = {"quick": 6, "usual": 15, "full": 40}
SAME = 1e-4
"""Largest relative difference of two losses that are the same."""

EACH, DEFAULT, MLP = "each alone", "default", "MLP alone"


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
PAIRS = (
    Pair(words="GPT, data 2", model="gpt-tiny", batch=4, data=2, **_REPLICAS),
    Pair(words="Llama, data 2", model="llama-tiny", batch=4, data=2, **_REPLICAS),
    Pair(words="GPT, data 4", model="gpt-tiny", batch=8, data=4, **_REPLICAS),
    Pair(words="Llama, data 4", model="llama-tiny", batch=8, data=4, **_REPLICAS),
    Pair(
        words="Llama, tensor 2 x data 2, ZeRO-1",
        model="llama-tiny",
        batch=8,
        tensor=2,
        data=2,
        zero=1,
        by_hand="mlp",
        plans=(EACH, DEFAULT),
    ),
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
    pinned = Pinned(micro_batches=1, recompute="none", tensor=pair.tensor, data=pair.data, zero=pair.zero)
    given: dict[str, Any] = {"update": planner.Update(buckets="none")} if who == EACH else {}
    cluster = load_profile("cpu").with_devices(pair.processes)
    return planner.search(pair.model, cluster, pinned=pinned, precision="fp32", global_batch=pair.batch, **given).plan


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
