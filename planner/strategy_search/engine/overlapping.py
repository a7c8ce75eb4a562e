"""What of finalists overlaps, and whether there is memory for it: every result is priced with its overlaps once."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from hardware_profiles import Bytes, Seconds
from planner.errors import LimitError
from planner.plan.binding.bind import BoundPlan
from planner.strategy_search.engine.exchange_overlap import with_expert_overlap
from planner.strategy_search.engine.plan_maker import PlanMaker
from planner.strategy_search.engine.product_overlap import (
    Everything,
    may_overlap,
    with_everything,
    with_fewer,
    with_tensor_overlap,
)
from planner.strategy_search.engine.proofs import Ranked


class _WithOverlap(NamedTuple):
    """A result, the same with its overlaps, and the bytes that it lacks to have more, with what these save (see
    `Overlapped`)."""

    plain: Ranked
    overlapped: Ranked
    missing: Bytes = 0.0
    saves: Seconds = 0.0


@dataclass(kw_only=True)
class Overlapping:
    """Overlaps of the results of a `maker`."""

    maker: PlanMaker

    def __post_init__(self) -> None:
        self.request, self.engine = self.maker.request, self.maker.engine
        self._overlapped: dict[int, _WithOverlap] = {}  # by identity
        self._every: dict[int, tuple[BoundPlan, Everything]] = {}  # of plans, likewise

    @property
    def possible(self) -> bool:
        """Whether tensor parallelism may communicate under its products."""
        return may_overlap(self.request.pinned, self.request.cluster)

    def expected(self, ranked: Ranked) -> Ranked:
        """A result with all the overlaps of its tensor parallelism that save time, whether they fit or not."""
        return (
            self.overlapped(ranked) if self.engine.has_experts else replace(ranked, bound=self.everything(ranked).bound)
        )

    def overlapped(self, ranked: Ranked) -> Ranked:
        """A result whose tensor parallelism communicates under its products, and whose experts under other work, where
        that is faster or asked for."""
        if id(ranked) not in self._overlapped:
            self._overlapped[id(ranked)] = self._with_overlap(ranked)
        return self._overlapped[id(ranked)].overlapped

    def missing(self, ranked: Ranked) -> Bytes:
        """What a result lacks to have more overlaps."""
        if not self.engine.has_experts:
            return self.everything(ranked).missing
        self.overlapped(ranked)
        return self._overlapped[id(ranked)].missing

    def saves(self, ranked: Ranked) -> Seconds:
        """What those would save that no sum of the search knows of."""
        if not self.engine.has_experts:
            return 0.0
        self.overlapped(ranked)
        return self._overlapped[id(ranked)].saves

    def everything(self, ranked: Ranked) -> Everything:
        """A result with all overlaps of its tensor parallelism that save time, and what it lacks for them."""
        if id(ranked.bound) not in self._every:
            machine, limits = self.engine.machine(ranked.configuration), self.maker.limits_of(ranked.configuration)
            found = with_everything(ranked.bound, self.request.pinned, machine, limits)
            self._every[id(ranked.bound)] = (ranked.bound, found)
        return self._every[id(ranked.bound)][1]

    def fewer(self, ranked: Ranked, below: Seconds) -> Iterator[Everything]:
        """A result with ever more of the overlaps of its tensor parallelism, but not all, and what it lacks for each;
        as far as it lacks anything, and takes less than `below` with them."""
        machine, limits = self.engine.machine(ranked.configuration), self.maker.limits_of(ranked.configuration)
        return with_fewer(self.everything(ranked).bound, machine, limits, below)

    def _with_overlap(self, ranked: Ranked) -> "_WithOverlap":
        with contextlib.suppress(LimitError):
            machine, limits = self.engine.machine(ranked.configuration), self.maker.limits_of(ranked.configuration)
            every = self.everything(ranked)
            if every.missing and self.maker.overfull_by(ranked) > 0:  # and with some of them, too
                return _WithOverlap(ranked, ranked, every.missing)
            bound, missing, _ = with_tensor_overlap(ranked.bound, self.request.pinned, machine, limits, every)
            bound, more, saves = with_expert_overlap(bound, self.request.pinned, machine, limits)
            bound = self.maker.proved(bound)
            configuration = replace(ranked.configuration, schedule=bound.plan.schedule)
            return _WithOverlap(
                ranked, replace(ranked, bound=bound, configuration=configuration), max(missing, more), saves
            )
        return _WithOverlap(ranked, ranked)

    def leave(self, ranked: Ranked) -> None:
        """Take a result as it is: its overlaps are of no interest."""
        self._overlapped.setdefault(id(ranked), _WithOverlap(ranked, ranked))
