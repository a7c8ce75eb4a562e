"""What the evaluation of a configuration comes to."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from planner.strategy_search.decomposition.lagrangian import State
from planner.strategy_search.decomposition.pieces import NEITHER, Column, Passes

Stored: TypeAlias = tuple[tuple[str, int], ...]
"""Weights, and the number of the stored layout of each."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankFilling:
    """One rank: inner blocks of all its chunks, one after the other, and what it holds before and after them.

    `peak` bytes in all, `beside` of them for what other stages hand over.
    """

    head: Column | None
    inner: tuple[Column, ...]
    tail: Column | None
    peak: float
    beside: float

    @property
    def columns(self) -> tuple[Column, ...]:
        """All of them, in order."""
        return tuple(one for one in (self.head, *self.inner, self.tail) if one is not None)

    def of_chunks(self, chunks: int) -> tuple[tuple[Column, ...], ...]:
        """Inner blocks of each of so many chunks, which hold equally many."""
        own = len(self.inner) // chunks
        return tuple(self.inner[chunk * own : (chunk + 1) * own] for chunk in range(chunks))


COARSE = 0.02
"""Share of its seconds by which a result may be above its bound before others are tried, where memory is free."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What is known about a configuration.

    Attributes:
        seconds: of the best division found; infinite where none was.
        waiting: of these, what virtual stages of unequal blocks wait for each other
            (`planner.strategy_search.engine.uneven_stages`), of which no sum knows.
        bound: no plan of this configuration takes less; infinite where nothing fits.
        free: what of that is proved whatever the memory, or less.
        state: candidates at the boundary.
        ranks: what each rank runs; empty where nothing was found.
        least: where nothing fits, bytes per device that the leanest way found would need.
        fullest: the rank that would need them.
        overfull: whether nothing that was looked at fits, however long it takes.
        price: seconds of the step that a byte more of memory would save, about.
        solved: problems solved.
        under: shares that counted of what travels under the work of each pass, beyond that work.
        gathers: how weights are gathered (`planner.sharding.update.GATHERS`).
        apart: whether launches count by pass and kind of block (`planner.strategy_search.tables.launches`).
        stored: how weights are stored that were divided among blocks, in which all agree: numbers of stored layouts.
    """

    seconds: float
    bound: float
    free: float = 0.0
    state: State
    ranks: tuple[RankFilling, ...]
    least: float
    fullest: int = 0
    overfull: bool = False
    price: float
    solved: int
    under: Passes = NEITHER
    gathers: str = "each"
    apart: bool = False
    stored: Stored = ()
    waiting: float = 0.0

    @property
    def open_seconds(self) -> float:
        """By how much its sum is above what is proved: what settling may save at most."""
        return max(0.0, self.seconds - self.waiting - self.bound)

    @property
    def coarse(self) -> bool:
        """Whether what was found is far from what is proved, and memory does not matter."""
        return bool(self.ranks) and not self.price and self.open_seconds > self.bound * COARSE


def best_try(outcomes: Sequence[Outcome]) -> Outcome:
    """The fastest of what was found for one way to gather weights, in several tries, with all that they prove."""
    best = min(outcomes, key=lambda outcome: outcome.seconds)
    solved = sum(outcome.solved for outcome in outcomes)
    return replace(best, bound=max(outcome.bound for outcome in outcomes), solved=solved)


def best_of(outcomes: Sequence[Outcome]) -> Outcome:
    """The fastest of what was found for the ways to gather weights, with what is proved, or missing, of all of them."""
    best = min(outcomes, key=lambda outcome: (outcome.seconds, outcome.bound))
    leanest = min(outcomes, key=lambda outcome: outcome.least)
    return replace(
        best,
        bound=min(outcome.bound for outcome in outcomes),
        least=leanest.least,
        fullest=leanest.fullest,
        overfull=all(outcome.overfull or outcome.bound == math.inf for outcome in outcomes),
        solved=sum(outcome.solved for outcome in outcomes),
    )


def proving_most(outcome: Outcome, other: Outcome, cutoff: float) -> Outcome:
    """Of two sums of a configuration the outcome of the one that proves more, of the first where the other neither
    found a plan nor ruled out all that take less than `cutoff`: no plan takes less than either sum."""
    solved = outcome.solved + other.solved
    known = other.ranks or other.bound >= cutoff
    return replace(other if known and other.bound > outcome.bound else outcome, solved=solved)


def ruled_out(gathers: str, seconds: float) -> Outcome:
    """Of a way to gather weights that was not tried, as it takes so many seconds or more."""
    return Outcome(
        seconds=math.inf, bound=seconds, state=(), ranks=(), least=math.inf, price=0.0, solved=0, gathers=gathers
    )


_AGREED = 3
"""Ways to store weights in which blocks are made to agree, at most."""


def ways_to_store(outcome: Outcome, divided: Sequence[str]) -> list[Stored]:
    """How blocks that each chose for itself store the weights that were divided among them, the most common first."""
    columns = [column for rank in outcome.ranks for column in rank.columns if divided[0] in column.candidates]
    chosen = Counter(
        tuple((name, column.candidates[name]) for name in divided if name in column.candidates) for column in columns
    )
    usual = dict(pair for way, _ in reversed(chosen.most_common()) for pair in way)
    return [tuple({**usual, **dict(way)}.items()) for way, _ in chosen.most_common(_AGREED)]
