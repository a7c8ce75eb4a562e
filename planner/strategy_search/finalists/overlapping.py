"""The overlaps of finalists, and whether there is memory for them: every plan is priced with its overlaps once."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from hardware_profiles import Bytes, Seconds
from planner.errors import LimitError
from planner.plan.binding.bind import BoundPlan
from planner.strategy_search.engine.exchange_overlap import with_expert_overlap
from planner.strategy_search.engine.product_overlap import (
    Everything,
    may_overlap,
    with_everything,
    with_fewer,
    with_tensor_overlap,
)
from planner.strategy_search.finalists.plan_maker import PlanMaker
from planner.strategy_search.finalists.proofs import Ranked


class _WithOverlap(NamedTuple):
    """A plan, the same plan with its overlaps, and the bytes that it lacks to have more, with the seconds that these
    save (see `Overlapped`)."""

    plain: Ranked
    overlapped: Ranked
    missing: Bytes = 0.0
    saves: Seconds = 0.0


@dataclass(kw_only=True)
class Overlapping:
    """Overlaps of the plans of a `maker`."""

    maker: PlanMaker

    def __post_init__(self) -> None:
        self.request, self.engine = self.maker.request, self.maker.engine
        self._overlapped: dict[int, _WithOverlap] = {}  # by id
        self._of_bound: dict[int, _WithOverlap] = {}  # by id of the bound plan
        self._every: dict[int, tuple[BoundPlan, Everything]] = {}  # of plans, by id

    @property
    def possible(self) -> bool:
        """Whether collectives of tensor parallelism may overlap with its matrix products."""
        return may_overlap(self.request.pinned, self.request.cluster)

    def expected(self, ranked: Ranked) -> Ranked:
        """A plan with all the overlaps of its tensor parallelism that save time, whether they fit or not."""
        return (
            self.overlapped(ranked) if self.engine.has_experts else replace(ranked, bound=self.everything(ranked).bound)
        )

    def overlapped(self, ranked: Ranked) -> Ranked:
        """A plan whose tensor parallelism overlaps with its matrix products, and its exchange of experts with other
        work, if that is faster or asked for."""
        if id(ranked) not in self._overlapped:
            known = self._of_bound.get(id(ranked.bound))
            if known is not None and known.plain.configuration == ranked.configuration:
                bound, configuration = known.overlapped.bound, known.overlapped.configuration
                overlapped = replace(ranked, bound=bound, configuration=configuration)
                self._overlapped[id(ranked)] = known._replace(plain=ranked, overlapped=overlapped)
            else:
                self._overlapped[id(ranked)] = self._of_bound[id(ranked.bound)] = self._with_overlap(ranked)
        return self._overlapped[id(ranked)].overlapped

    def missing(self, ranked: Ranked) -> Bytes:
        """The bytes that a plan lacks to have more overlaps."""
        if not self.engine.has_experts:
            return self.everything(ranked).missing
        self.overlapped(ranked)
        return self._overlapped[id(ranked)].missing

    def saves(self, ranked: Ranked) -> Seconds:
        """The seconds that those overlaps would save and that no objective counts."""
        if not self.engine.has_experts:
            return 0.0
        self.overlapped(ranked)
        return self._overlapped[id(ranked)].saves

    def everything(self, ranked: Ranked) -> Everything:
        """A plan with all overlaps of its tensor parallelism that save time, and the bytes that it lacks for them."""
        if id(ranked.bound) not in self._every:
            machine, limits = self.engine.machine(ranked.configuration), self.maker.limits_of(ranked.configuration)
            found = with_everything(ranked.bound, self.request.pinned, machine, limits)
            self._every[id(ranked.bound)] = (ranked.bound, found)
        return self._every[id(ranked.bound)][1]

    def fewer(self, ranked: Ranked, below: Seconds) -> Iterator[Everything]:
        """A plan with ever more of the overlaps of its tensor parallelism, but not all, and the bytes that it lacks for
        each. Only those that lack memory and take less than `below`."""
        machine, limits = self.engine.machine(ranked.configuration), self.maker.limits_of(ranked.configuration)
        return with_fewer(self.everything(ranked).bound, machine, limits, below)

    def _with_overlap(self, ranked: Ranked) -> "_WithOverlap":
        with contextlib.suppress(LimitError):
            machine, limits = self.engine.machine(ranked.configuration), self.maker.limits_of(ranked.configuration)
            every = self.everything(ranked)
            if every.missing and self.maker.overfull_by(ranked) > 0:  # with some of them as well
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
        """Take a plan without overlaps."""
        self._overlapped.setdefault(id(ranked), _WithOverlap(ranked, ranked))
