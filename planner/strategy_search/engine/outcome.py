"""The result of the evaluation of a configuration."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from planner.strategy_search.decomposition.pieces import NEITHER, Column, Passes
from planner.strategy_search.decomposition.priced import State
from planner.strategy_search.request.template import Key

Agreed: TypeAlias = tuple[tuple[Key, int], ...]
"""Weights, and the number of the stored layout of each; operators, and the number of the strategy of each."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankFilling:
    """One rank: the inner blocks of all its chunks, one after the other, and the columns before and after them.

    `peak` bytes in all, `beside` of them for what other stages hand over.
    """

    head: Column | None
    inner: tuple[Column, ...]
    tail: Column | None
    peak: float
    beside: float

    @property
    def columns(self) -> tuple[Column, ...]:
        """All columns, in order."""
        return tuple(one for one in (self.head, *self.inner, self.tail) if one is not None)

    def of_chunks(self, chunks: int) -> tuple[tuple[Column, ...], ...]:
        """The inner blocks of each of `chunks` chunks, which hold equally many."""
        own = len(self.inner) // chunks
        return tuple(self.inner[chunk * own : (chunk + 1) * own] for chunk in range(chunks))


COARSE = 0.02
"""Where memory is free, a result may be above its bound by this share before other prices are tried."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What is known about a configuration.

    Attributes:
        seconds: of the best division found; infinite if there was none.
        waiting: of these, how long virtual stages of unequal blocks wait for each other
            (`planner.strategy_search.engine.uneven_stages`), which no objective counts.
        bound: no plan of this configuration takes less; infinite if nothing fits.
        free: the bound for any memory, or less.
        state: candidates at the boundary.
        ranks: what each rank runs; empty if nothing was found.
        least: if nothing fits, bytes per device that the leanest way found would need.
        fullest: the rank that would need them.
        overfull: whether nothing that was looked at fits, however long it takes.
        price: about the seconds of the step that a byte more of memory would save.
        solved: number of problems solved.
        under: for each pass, the share that counted of the communication that its work cannot overlap.
        gathers: how weights are gathered (`planner.sharding.update.GATHERS`).
        apart: whether launches count by pass and kind of block (`planner.strategy_search.tables.launches`).
        agreed: the stored layouts and the strategies, by number, on which all pieces agree for the weights and
            operators for which each piece chose by itself at first.
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
    agreed: Agreed = ()
    waiting: float = 0.0

    @property
    def open_seconds(self) -> float:
        """The gap between objective and bound: an upper bound on what settling may save."""
        return max(0.0, self.seconds - self.waiting - self.bound)

    @property
    def coarse(self) -> bool:
        """Whether the plan found is far from its bound, and memory does not bind."""
        return bool(self.ranks) and not self.price and self.open_seconds > self.bound * COARSE


def best_try(outcomes: Sequence[Outcome]) -> Outcome:
    """The fastest result of several tries for one way to gather weights, with all that they prove."""
    best = min(outcomes, key=lambda outcome: outcome.seconds)
    solved = sum(outcome.solved for outcome in outcomes)
    return replace(best, bound=max(outcome.bound for outcome in outcomes), solved=solved)


def best_of(outcomes: Sequence[Outcome]) -> Outcome:
    """The fastest result over the ways to gather weights, with the bound, or the missing memory, over all of them."""
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
    """The outcome of the objective with the higher bound, since no plan takes less than either objective. The first, if
    the other neither found a plan nor ruled out everything below `cutoff`."""
    solved = outcome.solved + other.solved
    known = other.ranks or other.bound >= cutoff
    return replace(other if known and other.bound > outcome.bound else outcome, solved=solved)


def ruled_out(gathers: str, seconds: float) -> Outcome:
    """The outcome of a way to gather weights that was not tried, because it takes at least `seconds`."""
    return Outcome(
        seconds=math.inf, bound=seconds, state=(), ranks=(), least=math.inf, price=0.0, solved=0, gathers=gathers
    )


_AGREED = 3
"""Maximum number of ways on which pieces are made to agree."""


def ways_to_agree(outcome: Outcome, relaxed: Sequence[Key]) -> list[Agreed]:
    """What blocks, each choosing for itself, choose for some weights and operators; the most common first."""
    columns = [column for rank in outcome.ranks for column in rank.columns]
    ways = [tuple((key, column.candidates[key]) for key in relaxed if key in column.candidates) for column in columns]
    chosen = Counter(way for way in ways if way)
    usual = dict(pair for way, _ in reversed(chosen.most_common()) for pair in way)
    return [tuple({**usual, **dict(way)}.items()) for way, _ in chosen.most_common(_AGREED)]
