"""Finalists that do not fit: plans are found again that leave memory for what the search does not count, and for
overlaps."""

import contextlib
import math
from dataclasses import dataclass, field, replace

from hardware_profiles import Bytes, Seconds
from planner.errors import LimitError
from planner.limits import seconds_left
from planner.pricing.bucket_size import room_of
from planner.strategy_search.engine.contenders import Contender
from planner.strategy_search.engine.engine import Engine
from planner.strategy_search.engine.product_overlap import Everything
from planner.strategy_search.engine.scheduling import (
    WORTH,
    asks,
    may_lie_in_a_v,
    reorders,
)
from planner.strategy_search.finalists.orders import Orders
from planner.strategy_search.finalists.overlapping import Overlapping
from planner.strategy_search.finalists.plan_maker import PlanMaker
from planner.strategy_search.finalists.proofs import Ranked

_LEANER = 10
"""Maximum number of attempts with less memory for a contender that does not fit."""

_GROWS = 4
"""Factor by which the memory that is left free grows from one attempt to the next."""

_SLACK = 0.1
"""Share of its memory that a plan may leave unused on every device before less memory is left free."""

_HALVINGS = 4
"""Maximum number of times that less memory is left free."""

_TIMES = 2
"""Number of times that the missing memory of some overlaps is left free for them: the plan found may need more
again."""

_LESS = 0.5
"""More memory is left free for overlaps as long as each attempt reduces the missing memory to at most this share."""


@dataclass(kw_only=True)
class Room:
    """Plans of contenders with less memory than the search allows. If another engine than that of the `maker` found a
    contender, `sources` gives that engine and its `covering` share (see `Evaluation`)."""

    maker: PlanMaker
    overlapping: Overlapping
    orders: Orders
    sources: dict[int, tuple[Contender, Engine, float]] = field(default_factory=dict)  # by id

    def __post_init__(self) -> None:
        self.request, self.engine = self.maker.request, self.maker.engine

    def hoped(self, ranked: Ranked) -> Seconds:
        """A rough lower bound on the step time of a plan with all its overlaps, in any schedule, if there were memory
        for it. A plan that leaves memory for the overlaps takes longer by as much as its objective is higher."""
        return min(self._in_its_order(ranked), self.orders.in_other_orders(ranked))

    def _in_its_order(self, ranked: Ranked) -> Seconds:
        return self.overlapping.expected(ranked).seconds - self.overlapping.saves(ranked)

    def least(self, ranked: Ranked, cutoff: Seconds) -> Seconds:
        """The same in the schedules that leave bubbles. These are priced only if the estimates lie on both sides of the
        `cutoff`."""
        own = self._in_its_order(ranked) if self.overlapping.possible else ranked.seconds
        hoped = min(own, self.orders.in_other_orders(ranked))
        if not hoped < cutoff <= own or asks(self.request.pinned):
            return hoped
        return max(hoped, min(own, self.orders.in_any(ranked) - max(0.0, ranked.seconds - own)))

    def in_any_order(self, ranked: Ranked) -> Seconds:
        """The same, without any bubble where stages may lie in a V or other schedules are possible."""
        hoped = self.hoped(ranked) if self.overlapping.possible else ranked.seconds
        turns = reorders(self.request.pinned) or may_lie_in_a_v(self.request)
        return min(hoped, ranked.seconds - ranked.bubble) if turns else hoped

    def lean(self, found: Contender, ranked: Ranked, cutoff: Seconds) -> Ranked:
        """A plan of a contender that fits, and leaves memory for its overlaps where that is faster."""
        leaner, ranked = self.leaner(found, ranked, cutoff)
        if not self.maker.storable(ranked):
            return ranked
        return self.with_room(leaner, ranked, cutoff)

    def leaner(self, found: Contender, ranked: Ranked, cutoff: Seconds) -> tuple[Contender, Ranked]:
        """A contender that needs more memory than the search counts, for its schedule or for redistributions on their
        way, found again with as much less memory as that takes, as long as it may take less than `cutoff`. It is
        unchanged if it fits, if nothing fits, or if even with the missing memory it would take `cutoff`, settled
        too."""
        limits, any_order = self.maker.limits_of(found.configuration), reorders(self.request.pinned)
        leaner, other, missing, room, tried = found, ranked, self.maker.overfull_by(ranked), 0.0, 0
        before = room
        if missing > 0 and self.in_any_order(ranked) - found.outcome.open_seconds >= cutoff:
            return found, ranked
        with contextlib.suppress(LimitError):
            while missing > 0 and tried < _LEANER:
                # first as if the uncounted memory grew with the counted; then what is missing, and more, as plans
                # change in steps
                beside, before = self._beyond(found, other, room, missing), room
                room += max(
                    missing * _GROWS ** (tried - 1) if tried else missing * limits[0] / (limits[0] + missing), beside
                )
                leaner = self.again(found, room)
                if not leaner.outcome.ranks or leaner.least_step(any_order=any_order) >= cutoff:
                    break
                other = self.maker.unsettled(leaner)
                other = self.orders.reordered(other, cutoff) if any_order else other
                missing, tried = self.maker.overfull_by(other), tried + 1
            if missing <= 0 < tried:
                return self._less_room(found, leaner, other, before, cutoff)
        return (leaner, other) if missing <= 0 else (found, ranked)

    def _less_room(
        self, found: Contender, leaner: Contender, ranked: Ranked, low: Bytes, cutoff: Seconds
    ) -> tuple[Contender, Ranked]:
        """A contender that fits, found again with less memory left free, between `low`, with which it did not fit, and
        what it leaves now: one rank may need much more than the search counts, and the others then recompute for
        nothing. It is unchanged where it fills its memory, or is hardly slower than the contender without room."""
        slack = _SLACK * min(self.maker.limits_of(found.configuration))
        high, any_order = leaner.room, reorders(self.request.pinned)
        with contextlib.suppress(LimitError):
            for _ in range(_HALVINGS):
                spare = -self.maker.overfull_by(ranked)
                if spare <= slack or leaner.objective <= found.objective * (1 + WORTH):
                    break
                middle = (low + high) / 2
                tighter = self.again(found, middle)
                if not tighter.outcome.ranks:
                    break
                other = self.maker.unsettled(tighter)
                other = self.orders.reordered(other, cutoff) if any_order else other
                if self.maker.overfull_by(other) > 0:
                    low = middle
                elif tighter.objective < leaner.objective:
                    leaner, ranked, high = tighter, other, middle
                else:
                    break
        return leaner, ranked

    def again(self, found: Contender, room: Bytes) -> Contender:
        """A contender found again with `room` bytes left free, by the engine that found it: without buckets, for
        example."""
        own = self.engine.source_of(found.outcome)
        engine, covering = self.sources.get(id(found), (found, own, 0.0))[1:]
        hint = (found.outcome.price, found.outcome.under)
        outcome = engine.evaluate_as(
            found.outcome.gathers, found.configuration, hint=hint, room=room, covering=covering
        )
        again = replace(found, outcome=outcome, room=room)
        self.sources[id(again)] = (again, engine, covering)
        return again

    def _beyond(self, found: Contender, ranked: Ranked, room: Bytes, missing: Bytes) -> Bytes:
        """How many bytes beyond `room` must be left free of every device for plans that lack `missing` bytes because
        they hold more than the search counts. The memory that the rank with the largest lack has left by that count is
        included."""
        limits, stages = self.maker.limits_of(found.configuration), ranked.plan.prediction.stages
        rank = max(range(len(stages)), key=lambda rank: stages[rank].peak_bytes - limits[rank])
        if not ranked.filled:
            return missing
        capacity = self.engine.capacities[self.engine.group_of(found.configuration, rank)]
        return missing + max(0.0, capacity - room - ranked.filled[rank])

    def with_room(self, found: Contender, ranked: Ranked, cutoff: Seconds) -> Ranked:
        """A contender that leaves memory for its overlaps if it lacks that memory, if it is faster that way, and if it
        may take less than `cutoff`."""
        if not self.overlapping.possible or seconds_left() < math.inf:
            return ranked  # with a time limit the rest of the time is for other contenders
        room, other, buckets = found.room, ranked, room_of(found.pipeline_of_kinds.chain.tables.update.bucket_size)
        before, any_order, cutoff = math.inf, reorders(self.request.pinned), min(cutoff, ranked.seconds)
        with contextlib.suppress(LimitError):
            # a plan found with less memory may need more for its overlaps, perhaps without an end, and more for
            # buckets, which may be smaller now for lack of memory
            tried, saves, hoped = 0, self.overlapping.saves(ranked), self.least(ranked, cutoff)
            while (
                0 < (missing := self.overlapping.missing(other)) <= (before if saves else _LESS * before)
                and tried < _LEANER
            ):
                if other.filled and not saves:  # what plans need beyond the count of the search
                    more = self._beyond(found, other, room, missing)
                else:
                    more = max(missing * (2**tried if saves else 1), room / 4)
                before, room, tried = missing, (max(room, buckets) if tried else room) + more, tried + 1
                leaner = self.again(found, room)
                if not leaner.outcome.ranks or leaner.least_step(any_order=any_order) - saves >= cutoff:
                    break
                if hoped + leaner.objective - found.objective >= cutoff:
                    break
                other = self.maker.unsettled(leaner)
                if any_order:
                    other = self.orders.reordered(other, cutoff)
            if other is not ranked:
                every = self.overlapping.expected(ranked).seconds * (1 + WORTH)
                seconds, before = self._seconds(other), self.overlapping.overlapped(ranked).seconds
                if seconds < before or seconds < every:
                    return other if seconds < self._seconds(ranked) else ranked
            return self._with_some_room(found, ranked, cutoff)
        return ranked

    def _with_some_room(self, found: Contender, ranked: Ranked, cutoff: Seconds) -> Ranked:
        """A contender that leaves memory only for those overlaps that need the least, as many as make it faster, where
        memory for all of them is too much."""
        best, any_order = ranked, reorders(self.request.pinned)
        if not self.overlapping.missing(ranked):
            return ranked
        for fewer in self.overlapping.fewer(ranked, min(cutoff, self._seconds(ranked)) * (1 - WORTH)):
            limit = min(cutoff, self._seconds(best))
            if fewer.seconds >= limit * (1 - WORTH):
                continue
            room, more = found.room, self._beyond(found, ranked, found.room, fewer.missing)
            for _ in range(_TIMES):
                room += more
                leaner = self.again(found, room)
                if not leaner.outcome.ranks:
                    return best
                if fewer.seconds + leaner.objective - found.objective >= limit:
                    break
                other = self.maker.unsettled(leaner)
                other = self.orders.reordered(other, cutoff) if any_order else other
                if self._seconds(other) < self._seconds(best):
                    best = other
                if _overlaps(self.overlapping.overlapped(other)) >= _overlaps(fewer):
                    break
        return best

    def _seconds(self, ranked: Ranked) -> Seconds:
        """Seconds of a step with the overlaps that fit; infinite if the plan does not even fit without them."""
        overlapped = self.overlapping.overlapped(ranked)
        return overlapped.seconds if self.maker.storable(overlapped) else math.inf


def _overlaps(plan: Ranked | Everything) -> int:
    return len(plan.bound.plan.training.tensor_overlap)
