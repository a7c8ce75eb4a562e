"""How far measured peaks of memory lie from predicted ones, by training stack.

Quantiles of measured / predicted of published runs that say what their peak counts and that fill a quarter of a device
or more: of smaller ones constants are most of what is off, and nothing runs out of memory. A run that ran out of memory
though it was predicted to fit has no peak, and would be left out just because it is the worst there is: it counts with
the least that its peak can have been, the capacity. A stack with fewer than `FEWEST` such runs takes those of all
stacks. What the upper end has over 1 is the margin that a plan leaves free, so that of twenty plans that are called
feasible nineteen are, by the runs that there are. `python tests/benchmarks/bench_memory.py --write` makes the table.
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
"""Runs below which a stack says nothing of its own: of n runs of one kind the next exceeds all in 1 / (n + 1) of
the cases, whatever their distribution, so that the largest of fewer than 1 / TAIL - 1 is no end that one in twenty
exceeds."""

OTHER = "other"
_TABLE = "memory_intervals.csv"


def peak_spread(stack: str) -> Spread:
    """That of a stack, else that of all."""
    return table().get(stack, table()[OTHER])


def peak_spreads(ratios: Iterable[tuple[str, float]]) -> dict[str, Spread]:
    """Ends of the intervals from measured / predicted, each with its stack."""
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
    """The packaged ends."""
    text = resources.files("hardware_profiles").joinpath(_TABLE).read_text(encoding="utf-8")
    return {
        row["stack"]: Spread(low=float(row["low"]), high=float(row["high"]), runs=int(row["runs"]))
        for row in csv.DictReader(text.splitlines())
    }


def dump_peak_spreads(spreads: dict[str, Spread]) -> str:
    """The content of the packaged table."""
    lines = ["stack,runs,low,high"]
    lines += [f"{name},{one.runs},{one.low:.4g},{one.high:.4g}" for name, one in sorted(spreads.items())]
    return "\n".join(lines) + "\n"
