"""How far measured peaks of memory lie from predicted ones, by training stack.

The ends are quantiles of measured / predicted over published runs that state what their peak counts and that fill a
quarter of a device or more. In smaller runs constants make most of the error, and nothing runs out of memory. A run
that ran out of memory although it was predicted to fit has no peak. Leaving it out would leave out the worst case, so
it counts with the least peak that it can have had, the capacity. A stack with fewer than `FEWEST` such runs takes those
of all stacks. A plan leaves free what the upper end has over 1, so that nineteen of twenty plans that are called
feasible are feasible, by the runs that there are. `python tests/benchmarks/bench_memory.py --write` makes the table.
"""

import csv
from collections.abc import Iterable
from functools import lru_cache
from importlib import resources
from math import floor

from hardware_profiles.intervals import Spread

TAIL = 0.05
"""Share of the runs beyond each end."""

FEWEST = 19
"""A stack with fewer runs has no interval of its own. Of n runs of one kind, the next one exceeds all with probability
1 / (n + 1), whatever their distribution. So with fewer than 1 / TAIL - 1 runs, more than one in twenty exceed the
largest."""

OTHER = "other"
_TABLE = "memory_intervals.csv"


def peak_spread(stack: str) -> Spread:
    """The interval of a stack, or that of all stacks if it has none."""
    return table().get(stack, table()[OTHER])


def peak_spreads(ratios: Iterable[tuple[str, float]]) -> dict[str, Spread]:
    """Intervals by stack, from measured / predicted peaks, each given as (stack, ratio)."""
    stacks: dict[str, list[float]] = {OTHER: []}
    for stack, ratio in ratios:
        stacks.setdefault(stack, []).append(ratio)
        stacks[OTHER].append(ratio)
    return {name: _spread(found) for name, found in stacks.items() if len(found) >= FEWEST or name == OTHER}


def _spread(ratios: list[float]) -> Spread:
    ordered = sorted(ratios)
    place = max(0, floor((len(ordered) + 1) * TAIL) - 1)
    return Spread(low=min(1.0, ordered[place]), high=max(1.0, ordered[-1 - place]), runs=len(ordered))


@lru_cache(maxsize=1)
def table() -> dict[str, Spread]:
    """The packaged intervals by stack."""
    text = resources.files("hardware_profiles").joinpath(_TABLE).read_text(encoding="utf-8")
    return {
        row["stack"]: Spread(low=float(row["low"]), high=float(row["high"]), runs=int(row["runs"]))
        for row in csv.DictReader(text.splitlines())
    }


def dump_peak_spreads(spreads: dict[str, Spread]) -> str:
    """The text of the packaged table for these intervals."""
    lines = ["stack,runs,low,high"]
    lines += [f"{name},{one.runs},{one.low:.4g},{one.high:.4g}" for name, one in sorted(spreads.items())]
    return "\n".join(lines) + "\n"
