"""The best contenders as plans: settled, bound to their graph, priced by the judge, each in its fastest order of turns.

The search ranks what it finds by sums. Those few that may be the fastest are priced here as what they are: whole plans.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

from hardware_profiles import Bytes, Hidden, Seconds
from planner.errors import InfeasibleError, LimitError
from planner.limits import reached, reading, seconds_left
from planner.plan.layout.offloaded import offloaded_fault
from planner.plan.prediction.stage_cost import TRANSFER
from planner.plan.prediction.step import PIPELINE_BUBBLE
from planner.pricing.bucket_size import auto_bucket, room_of
from planner.sharding.rules import rule_of
from planner.sharding.update import AUTO_BUCKETS, EACH
from planner.strategy_search.engine.contenders import NEAR, Contender
from planner.strategy_search.engine.engine import Engine
from planner.strategy_search.engine.exchange_overlap import in_parts, with_expert_overlap
from planner.strategy_search.engine.next_price import REDUCTIONS
from planner.strategy_search.engine.plan_maker import PlanMaker
from planner.strategy_search.engine.product_overlap import (
    ChunksError,
    Everything,
    may_overlap,
    with_everything,
    with_tensor_overlap,
)
from planner.strategy_search.engine.proofs import OPTIMAL, Ranked
from planner.strategy_search.engine.scheduling import (
    IN_A_V,
    WORTH,
    as_asked,
    asks,
    fastest_schedule,
    may_lie_in_a_v,
    reorders,
    turns_may_cover,
    with_turns,
)
from planner.strategy_search.request.offload import NOTHING

_MESSAGES = 2e-3
"""Share of a step that messages may take beyond what the search knows of them, before others are tried."""

_HOPED = 0.05
"""Share by which a step may take longer than its sum, before blocks are sought that cover more of what travels."""

_COVERS = (1.0, 0.25)
"""Shares of what travels that count then, whatever covers it."""

_LEANER = 10
"""Times that a contender which does not fit is looked at with less memory, at most."""

_GROWS = 4
"""By what the memory that is left grows from one time to the next."""

_IDLE = 0.05
"""Share of a step that a pipeline must be idle, before its stages are tried in a V: some of it is left there, and
dividing them anew takes as long as it took before."""

_HELD = 0.5
"""Of what a rank holds of micro-batches in flight, what another one holds at least: the rest may be of one block."""

_TURNED = 2
"""Results whose stages are tried in a V, at most."""

_LESS = 0.5
"""Of what was missing for overlaps, more is left for them as long as so much or less is missing then."""


class OverfullError(Exception):
    """What was found holds more than there is, by so many bytes: the sums of the search count what a schedule that
    holds more than 1F1B keeps for too little, and of states that are shared out by whole parameters the mean. No plan
    takes less than `bound` seconds by its objective."""

    def __init__(self, excess: float, bound: float, message: str) -> None:
        super().__init__(message)
        self.excess, self.bound, self.message = excess, bound, message


class _WithOverlap(NamedTuple):
    """A result, the same with its overlaps, and the bytes that it lacks to have more, with what these save (see
    `Overlapped`)."""

    plain: Ranked
    overlapped: Ranked
    missing: Bytes = 0.0
    saves: Seconds = 0.0


@dataclass(kw_only=True)
class Finalists:
    """Contenders `found` by the search, and what `maker` makes of them."""

    maker: PlanMaker
    found: Sequence[Contender]

    def __post_init__(self) -> None:
        self.request, self.engine = self.maker.request, self.maker.engine
        self._sources: dict[int, tuple[Contender, Engine, float]] = {}  # by identity, where that is another engine
        self._known: dict[int, tuple[Contender, Ranked]] = {}  # by identity
        self._before: dict[int, Ranked] = {}  # of what is known, without overlaps
        self._overlapped: dict[int, _WithOverlap] = {}  # by identity
        self._every: dict[int, tuple[Ranked, Everything]] = {}  # likewise
        self._settled: dict[int, Ranked] = {}  # of contenders, by identity
        self._turned: dict[int, tuple[Ranked, Ranked]] = {}
        self._laid: dict[tuple[int, str], Ranked | None] = {}  # in a V, by the identity of what is in `_known`

    def plans(self, *, settle: bool = True) -> tuple[Ranked, ...]:
        """The fastest of the contenders, fastest first; those that cannot be among them are not priced. Unless it is
        for their seconds alone, they are settled."""
        top, plans, fitting = self.request.top, list[Ranked](), list[Ranked]()
        longest = 0.0  # seconds to make a plan of one
        refusal = None
        # what is known says how fast others must be; the least sum first, which others are measured by
        ordered = sorted(self.found, key=lambda found: (id(found) not in self._known, found.objective, found.order))
        for found in ordered:
            slowest = fitting[top - 1].seconds if len(fitting) >= top else math.inf
            if self._least_step(found) >= slowest * (1 - OPTIMAL):
                continue
            if plans and (reached() or seconds_left() < longest):
                break
            began = reading()
            try:
                ranked = self._priced_once(found, slowest)
            except ChunksError as error:  # this one has nothing that could be in so many
                refusal = refusal or error
                continue
            longest = max(longest, reading() - began)
            plans.append(ranked)
            if self.maker.fits(ranked.configuration, ranked.plan.prediction):
                fitting = sorted([*fitting, ranked], key=lambda ranked: ranked.seconds)
        if refusal is not None and not plans:
            raise refusal
        if not fitting:
            raise _overfull(plans, self.maker.limits[0], self.maker.bound)
        if settle:
            fitting = self._with_settled(ordered, fitting)
        faults = [offloaded_fault(ranked.plan.prediction, self.request.cluster) for ranked in fitting]
        if all(faults):
            raise InfeasibleError(
                f"{self.request.model.reference} does not fit beside the devices: {faults[0]}; take --offload"
                " optimizer:disk, or more devices"
            )
        best, *others = [ranked for ranked, fault in zip(fitting, faults, strict=True) if fault is None]
        if seconds_left() >= longest:
            best = self._in_a_v(self._with_turns(best))
        return tuple(sorted([best, *others[: top - 1]], key=lambda ranked: ranked.seconds))

    def _with_settled(self, ordered: Sequence[Contender], fitting: list[Ranked]) -> list[Ranked]:
        """The plans of contenders, fastest first, with those settled that may be among the fastest so: what a plan may
        save is what its sum is above what no plan of its configuration takes less than."""
        top = self.request.top
        kept = {id(ranked): ranked for ranked in fitting}
        known = [found for found in ordered if id(found) in self._known and id(self._known[id(found)][1]) in kept]
        for found in sorted(known, key=lambda found: self._known[id(found)][1].seconds):
            ranked = self._known[id(found)][1]
            slowest = sorted(one.seconds for one in kept.values())[:top][-1]
            settled = self._settled_once(found, slowest)
            kept[id(ranked)] = settled
        return sorted(kept.values(), key=lambda ranked: ranked.seconds)

    def _settled_once(self, found: Contender, cutoff: Seconds) -> Ranked:
        """The plan of a contender, settled as far as it may take less than `cutoff` then, or a solver is asked about
        it."""
        overlapped = self._known[id(found)][1]
        before = self._before[id(overlapped)]
        if id(found) in self._settled or before.found is None:
            return overlapped
        saves = before.found.objective - before.found.outcome.bound
        asked = self.request.certify or self.request.algorithm != "dynamic_programming"
        if overlapped.seconds - saves >= cutoff and not (asked and overlapped.seconds <= cutoff):
            return overlapped
        settled = self._settled[id(found)] = self.maker.settled(before)
        certified = replace(overlapped, certificate=settled.certificate)
        if settled.bound is not before.bound:
            with contextlib.suppress(LimitError):
                settled = self._reordered(settled, cutoff) if reorders(self.request.pinned) else settled
                other = self.overlapped(settled)
                if self._storable(other) and other.seconds < overlapped.seconds:
                    certified, before = other, settled
        self._before[id(certified)] = before
        self._known[id(found)] = (found, certified)
        return certified

    def _least_step(self, found: Contender) -> Seconds:
        """No plan of a contender takes less. What is proved of its configuration is about steps, too, where all
        operators come in order: in one stage, without turns, offload, or software that hides a share."""
        least, pinned = found.least_step(any_order=reorders(self.request.pinned)), self.request.pinned
        hides = self.request.cluster.software.hidden != Hidden()
        if found.configuration.pipeline > 1 or hides or asks(pinned) or self.request.offload != NOTHING:
            return least
        return max(least, found.outcome.bound)

    @property
    def overlaps(self) -> bool:
        """Whether tensor parallelism may communicate under its products."""
        return may_overlap(self.request.pinned, self.request.cluster)

    def _priced_once(self, found: Contender, cutoff: float) -> Ranked:
        """A contender as a plan, in an order of turns that takes it least, as far as it may take less than `cutoff`,
        and with what runs under its products. Raises RequestError where chunks are asked for that it cannot have."""
        if id(found) not in self._known:
            ranked = self._best_of(found, cutoff)
            overlapped = self.overlapped(ranked)
            self._before[id(overlapped)] = ranked
            self._known[id(found)] = (found, overlapped)
        return self._known[id(found)][1]

    def _best_of(self, found: Contender, cutoff: Seconds) -> Ranked:
        """The best plan of a contender, without its overlaps. Where these lack memory, plans that leave room for them
        are looked for first: beside what is found so, few of the others are of interest. Where not even with all of
        them, whatever memory there is, it would take less than `cutoff`, only plans of other sums are looked for."""
        ranked = self.maker.as_found(found)
        if not self.overlaps or not self._missing(ranked):
            return self._finished(*self._ranked(found, ranked), cutoff)
        if self._hoped(ranked) >= cutoff:
            source, other = self._ranked(found, ranked, cutoff)
            if other is not ranked:
                return self._finished(source, other, cutoff)
            self._overlapped.setdefault(id(ranked), _WithOverlap(ranked, ranked))
            return ranked
        roomy = self._finished(found, ranked, cutoff)
        least = self.overlapped(roomy).seconds
        if least <= found.objective * (1 + _MESSAGES):
            return roomy
        source, other = self._ranked(found, ranked, min(least, cutoff))
        if other is ranked:
            return roomy
        return min(roomy, self._finished(source, other, cutoff), key=lambda one: self.overlapped(one).seconds)

    def _hoped(self, ranked: Ranked) -> Seconds:
        """What a result takes at least, about, with all its overlaps, in any order of turns, were there memory for it:
        the plan of more room that has them takes as much more as its sum does."""
        own = self._expected(ranked).seconds - self._saves(ranked)
        return min(own, self._in_other_orders(ranked))

    def _expected(self, ranked: Ranked) -> Ranked:
        """A result with all the overlaps of its tensor parallelism that save time, whether they fit or not."""
        return self.overlapped(ranked) if self._has_experts else replace(ranked, bound=self._everything(ranked).bound)

    def _in_other_orders(self, ranked: Ranked) -> Seconds:
        """What a result of 1F1B takes at least in other orders of turns: where weight gradients are apart, without a
        bubble and without its overlaps; in one that holds more micro-batches, for which there may be no room, with
        transfers between stages under its work. Infinite where there are no others."""
        plan, pipeline = ranked.plan, ranked.plan.pipeline
        if pipeline == 1 or plan.schedule != "1f1b" or not reorders(self.request.pinned):
            return math.inf
        time, memory = dict(plan.prediction.time), dict(plan.prediction.memory)
        bubble, apart = time[PIPELINE_BUBBLE], ranked.seconds - time[PIPELINE_BUBBLE]
        holds = _HELD * memory["activations"] * (pipeline - 1) / pipeline
        if holds > -self._overfull_by(ranked):
            return apart
        return min(apart, self._expected(ranked).seconds - min(bubble, time[TRANSFER]))

    def _finished(self, found: Contender, ranked: Ranked, cutoff: Seconds) -> Ranked:
        """A plan of a contender in an order of turns that takes it least, with less memory if need be, and with room
        for its overlaps."""
        if reorders(self.request.pinned):
            with contextlib.suppress(LimitError):  # in the order that the search assumed, then
                ranked = self._one_by_one(found, self._reordered(ranked, cutoff), cutoff)
        if self.overlaps and self._overfull_by(ranked) > 0 and self._missing(ranked):
            roomy = self._with_room_for_overlap(found, ranked, cutoff)
            if not self._storable(roomy):
                return roomy if cutoff < math.inf else self._lean(found, ranked, cutoff)
            seconds = self.overlapped(roomy).seconds
            if seconds <= self._hoped(ranked) * (1 + WORTH):
                return roomy
            other = self._lean(found, ranked, min(cutoff, seconds))  # with less memory for fewer overlaps
            faster = self._storable(other) and self.overlapped(other).seconds < seconds
            return other if faster else roomy
        return self._lean(found, ranked, cutoff)

    def _lean(self, found: Contender, ranked: Ranked, cutoff: Seconds) -> Ranked:
        """A plan of a contender that fits, and leaves room for its overlaps where that is faster."""
        leaner, ranked = self._leaner(found, ranked, cutoff)
        if not self.maker.fits(found.configuration, ranked.plan.prediction):
            return ranked
        return self._with_room_for_overlap(leaner, ranked, cutoff)

    def _one_by_one(self, found: Contender, ranked: Ranked, cutoff: Seconds) -> Ranked:
        """A short pipeline that stays idle in 1F1B, or what is found for it with weights gathered one by one, in an
        order that takes less: gradients that go together are not deferred, which would fill the bubble."""
        short = ranked.plan.training.micro_batches <= ranked.plan.pipeline > 1
        idle = dict(ranked.plan.prediction.time)[PIPELINE_BUBBLE] > _IDLE * ranked.seconds
        if not short or not idle or ranked.plan.schedule != "1f1b" or found.outcome.gathers == EACH:
            return ranked
        if EACH not in self.engine.gathers:
            return ranked
        best = ranked
        for engine in (self.engine, self.engine.with_buckets_of_links) if self._capped(found) else (self.engine,):
            outcome = engine.evaluate_as(EACH, found.configuration, cutoff=found.objective * (1 + NEAR))
            if outcome.ranks:
                other = self.maker.as_found(replace(engine.contender(found.configuration, outcome), room=found.room))
                other = self._reordered(other, min(cutoff, best.seconds))
                if other.seconds < best.seconds and self.maker.fits(other.configuration, other.plan.prediction):
                    best = other
        return best

    def _reordered(self, ranked: Ranked, cutoff: Seconds) -> Ranked:
        """A result in the order of turns that takes it least, as far as that, with what overlaps then, may take less
        than `cutoff`, and less than it takes."""
        if not self.overlaps or asks(self.request.pinned):
            return self._scheduled(ranked, math.inf if self.overlaps else cutoff)
        others = self._in_other_orders(ranked)
        if others == math.inf or others >= min(cutoff, self._expected(ranked).seconds * (1 - WORTH)):
            return ranked
        return self._scheduled(ranked, math.inf)

    def _leaner(self, found: Contender, ranked: Ranked, cutoff: Seconds) -> tuple[Contender, Ranked]:
        """A contender that needs more memory than its sums know of, for its schedule or for redistributions on their
        way, found again with as much less as that takes, as far as it may take less than `cutoff`; as it is where it
        fits, or where nothing does."""
        limits, any_order = self.maker.limits_of(found.configuration), reorders(self.request.pinned)
        leaner, other, missing, room, tried = found, ranked, self._overfull_by(ranked), 0.0, 0
        with contextlib.suppress(LimitError):
            while missing > 0 and tried < _LEANER:
                # as if what is left out grew with what is known; then what is missing, and more: plans differ by steps
                beside = self._beyond(found, other, room, missing)
                room += max(
                    missing * _GROWS ** (tried - 1) if tried else missing * limits[0] / (limits[0] + missing), beside
                )
                leaner = self._again(found, room)
                if not leaner.outcome.ranks or leaner.least_step(any_order=any_order) >= cutoff:
                    break
                other = self.maker.as_found(leaner)
                other = self._reordered(other, cutoff) if any_order else other
                missing, tried = self._overfull_by(other), tried + 1
        return (leaner, other) if missing <= 0 else (found, ranked)

    def _again(self, found: Contender, room: Bytes) -> Contender:
        """What is found for a contender that leaves so much room, as it was found: without buckets, say."""
        engine, covering = self._sources.get(id(found), (found, self.engine, 0.0))[1:]
        outcome = engine.evaluate_as(found.outcome.gathers, found.configuration, room=room, covering=covering)
        again = replace(found, outcome=outcome, room=room)
        self._sources[id(again)] = (again, engine, covering)
        return again

    def _beyond(self, found: Contender, ranked: Ranked, room: Bytes, missing: Bytes) -> Bytes:
        """What more than `room` must be left of every device for plans that, as a result, hold so much more than their
        sums say that they lack `missing` bytes: with what the rank that lacks most has left by its sums."""
        limits, stages = self.maker.limits_of(found.configuration), ranked.plan.prediction.stages
        rank = max(range(len(stages)), key=lambda rank: stages[rank].peak_bytes - limits[rank])
        if not ranked.filled:
            return missing
        capacity = self.engine.capacities[self.engine.group_of(found.configuration, rank)]
        return missing + max(0.0, capacity - room - ranked.filled[rank])

    def _overfull_by(self, ranked: Ranked) -> Bytes:
        """What the fullest device lacks; negative where there is room."""
        stages, limits = ranked.plan.prediction.stages, self.maker.limits_of(ranked.configuration)
        return max(stage.peak_bytes - limit for stage, limit in zip(stages, limits, strict=True))

    def _with_room_for_overlap(self, found: Contender, ranked: Ranked, cutoff: Seconds) -> Ranked:
        """A contender that leaves room for its overlaps, where it has none for lack of memory, if it is faster so, and
        as far as it may take less than `cutoff`."""
        if not self.overlaps or seconds_left() < math.inf:
            return ranked  # of a search whose time is limited the rest is for other contenders
        room, other, buckets = found.room, ranked, room_of(found.pipeline_of_kinds.chain.tables.update.bucket_size)
        before, any_order, cutoff = math.inf, reorders(self.request.pinned), min(cutoff, ranked.seconds)
        with contextlib.suppress(LimitError):
            # what is found with less memory may need more for its overlaps, then perhaps without an end, and more
            # for buckets, which may be smaller now for lack of room
            tried, saves, hoped = 0, self._saves(ranked), self._hoped(ranked)
            while 0 < (missing := self._missing(other)) <= (before if saves else _LESS * before) and tried < _LEANER:
                if other.filled and not saves:  # what plans of its sums need
                    more = self._beyond(found, other, room, missing)
                else:
                    more = max(missing * (2**tried if saves else 1), room / 4)
                before, room, tried = missing, (max(room, buckets) if tried else room) + more, tried + 1
                leaner = self._again(found, room)
                if not leaner.outcome.ranks or leaner.least_step(any_order=any_order) - saves >= cutoff:
                    break
                if hoped + leaner.objective - found.objective >= cutoff:
                    break
                other = self.maker.as_found(leaner)
                if any_order:
                    other = self._reordered(other, cutoff)
            if other is ranked:
                return ranked
            every = self._expected(ranked).seconds * (1 + WORTH)
            overlapped = self.overlapped(other)
            if not self._storable(overlapped):
                return ranked
            return (
                other if overlapped.seconds < every or overlapped.seconds < self.overlapped(ranked).seconds else ranked
            )
        return ranked

    @property
    def priced(self) -> tuple[Ranked, ...]:
        """Contenders that `plans` has priced, those that do not fit left out."""
        known = (ranked for _, ranked in self._known.values())
        return tuple(one for one in known if self._storable(one))

    def plain(self, found: Contender) -> Ranked | None:
        """A contender as it was found, as a plan, in the order of turns that takes it least; None where it does not
        fit."""
        ranked = self.maker.settled(self.maker.as_found(found))
        pinned = self.request.pinned
        if asks(pinned) or (found.configuration.pipeline > 1 and reorders(pinned)):
            ranked = self._scheduled(ranked, math.inf)
        return self.overlapped(ranked) if self._storable(ranked) else None

    def _storable(self, ranked: Ranked) -> bool:
        """Whether a plan fits on the devices, and beside them."""
        fits = self.maker.fits(ranked.configuration, ranked.plan.prediction)
        return fits and offloaded_fault(ranked.plan.prediction, self.request.cluster) is None

    def _with_turns(self, overlapped: Ranked) -> Ranked:
        """A result whose micro-batches take turns, or whose sequence comes in slices, where that is faster; if need be
        with weights gathered one by one. Then nothing is overlapped."""
        if id(overlapped) not in self._turned:
            self._turned[id(overlapped)] = (overlapped, self._fastest_turns(overlapped))
        return self._turned[id(overlapped)][1]

    def _fastest_turns(self, overlapped: Ranked) -> Ranked:
        if (self.request.pinned.tensor_overlap or 0) > 1:
            return overlapped
        ranked = self._before[id(overlapped)]
        with contextlib.suppress(LimitError):
            configuration, best = ranked.configuration, self._in_turns(ranked, overlapped.seconds)
            machine = self.engine.machine(configuration)
            if EACH in self.engine.gathers and turns_may_cover(ranked.bound, self.request.pinned, machine):
                outcome = self.engine.evaluate_as(EACH, configuration)
                if outcome.ranks:
                    one_by_one = self.engine.contender(configuration, outcome)
                    best = self._in_faster_turns(one_by_one, best, min(overlapped.seconds, best.seconds))
            turns = best.plan.training.interleave > 1 or best.plan.slices > 1
            return min(overlapped, best if turns else self.overlapped(best), key=lambda one: one.seconds)
        return overlapped

    def _in_faster_turns(self, found: Contender, best: Ranked, cutoff: Seconds) -> Ranked:
        """A contender whose micro-batches take turns, or the best where that is as fast. What wins as it was found is
        settled."""
        as_found = self.maker.made(found, found.outcome.ranks)
        plain = Ranked(bound=as_found, configuration=found.configuration, memory_price=found.outcome.price, found=found)
        turned = self._in_turns(plain, cutoff)
        if turned.seconds >= best.seconds * (1 - WORTH) or not self._storable(turned):
            return best
        settled = self._in_turns(self.maker.settled(self.maker.as_found(found)), cutoff)
        return settled if settled.seconds < turned.seconds and self._storable(settled) else turned

    def _in_a_v(self, best: Ranked) -> Ranked:
        """The best, or a faster result with two stages on each rank, in a V, whose orders have next to no bubble:
        results are tried that are faster without theirs."""
        if not may_lie_in_a_v(self.request):
            return best
        bubbles = [
            (dict(ranked.plan.prediction.time)[PIPELINE_BUBBLE], number, found, ranked)
            for number, (found, ranked) in enumerate(self._known.values())
            if 1 < found.configuration.pipeline <= self.engine.template.blocks.count // 2
            and found.configuration.virtual_stages == 1
        ]
        hopeful = [
            (ranked.seconds - bubble, number, found)
            for bubble, number, found, ranked in bubbles
            if bubble > _IDLE * ranked.seconds
        ]
        for (least, _, found), schedule in product(sorted(hopeful)[:_TURNED], IN_A_V):
            if least < best.seconds * (1 - WORTH) and not reached():
                with contextlib.suppress(LimitError):
                    laid = self._laid_in_a_v(found, schedule, best.seconds)
                    if laid is not None and laid.seconds < best.seconds * (1 - WORTH):
                        best = laid
        return best

    def _laid_in_a_v(self, found: Contender, schedule: str, cutoff: Seconds) -> Ranked | None:
        """What a contender has, with its stages in a V; None where that takes `cutoff` or does not fit."""
        key = (id(found), schedule)
        if key not in self._laid:
            self._laid[key] = self._divided_for_a_v(found, schedule, cutoff)
        return self._laid[key]

    def _divided_for_a_v(self, found: Contender, schedule: str, cutoff: Seconds) -> Ranked | None:
        own, gathers = self._in_order_of_a_v, found.outcome.gathers
        configuration = replace(found.configuration, schedule=schedule)
        p, m = configuration.pipeline, configuration.micro_batches
        longer = cutoff * (m + p - 1) / m  # sums have the bubble of 1F1B
        outcome = own.engine.evaluate_as(gathers, configuration, cutoff=longer)
        if not outcome.ranks:
            return None
        ranked = own.overlapped(own._best_of(own.engine.contender(configuration, outcome), longer))
        return ranked if own._storable(ranked) else None

    @cached_property
    def _in_order_of_a_v(self) -> "Finalists":
        """What makes plans where such an order is asked for: nothing travels under its products, so that layouts are
        others."""
        request = replace(self.request, pinned=replace(self.request.pinned, schedule=IN_A_V[0]))
        engine = Engine(request=request, template=self.engine.template, limits=self.engine.limits)
        return Finalists(maker=replace(self.maker, request=request, engine=engine), found=())

    def overlapped(self, ranked: Ranked) -> Ranked:
        """A result whose tensor parallelism communicates under its products, and whose experts under other work, where
        that is faster or asked for."""
        if id(ranked) not in self._overlapped:
            self._overlapped[id(ranked)] = self._with_overlap(ranked)
        return self._overlapped[id(ranked)].overlapped

    def _missing(self, ranked: Ranked) -> Bytes:
        """What a result lacks to have more overlaps."""
        if not self._has_experts:
            return self._everything(ranked).missing
        self.overlapped(ranked)
        return self._overlapped[id(ranked)].missing

    def _saves(self, ranked: Ranked) -> Seconds:
        """What those would save that no sum of the search knows of."""
        if not self._has_experts:
            return 0.0
        self.overlapped(ranked)
        return self._overlapped[id(ranked)].saves

    @cached_property
    def _has_experts(self) -> bool:
        graph = self.engine.template.graph
        return any(rule_of(graph, operator).op_class == "experts" for operator in graph.operators)

    def _everything(self, ranked: Ranked) -> Everything:
        """A result with all overlaps of its tensor parallelism that save time, and what it lacks for them."""
        if id(ranked) not in self._every:
            machine, limits = self.engine.machine(ranked.configuration), self.maker.limits_of(ranked.configuration)
            found = with_everything(ranked.bound, self.request.pinned, machine, limits)
            self._every[id(ranked)] = (ranked, found)
        return self._every[id(ranked)][1]

    def _with_overlap(self, ranked: Ranked) -> "_WithOverlap":
        with contextlib.suppress(LimitError):
            machine, limits = self.engine.machine(ranked.configuration), self.maker.limits_of(ranked.configuration)
            every = self._everything(ranked)
            if every.missing and self._overfull_by(ranked) > 0:  # and with some of them, too
                return _WithOverlap(ranked, ranked, every.missing)
            bound, missing, _ = with_tensor_overlap(ranked.bound, self.request.pinned, machine, limits, every)
            bound, more, saves = with_expert_overlap(bound, self.request.pinned, machine, limits)
            bound = self.maker.proved(bound)
            configuration = replace(ranked.configuration, schedule=bound.plan.schedule)
            return _WithOverlap(
                ranked, replace(ranked, bound=bound, configuration=configuration), max(missing, more), saves
            )
        return _WithOverlap(ranked, ranked)

    def _in_turns(self, ranked: Ranked, cutoff: Seconds) -> Ranked:
        machine, limits = self.engine.machine(ranked.configuration), self.maker.limits_of(ranked.configuration)
        waits = in_parts(ranked.bound, self.request.pinned, machine)
        bound = with_turns(waits, self.request.pinned, machine, limits, cutoff)
        if bound is waits:
            return ranked
        return replace(ranked, bound=bound, configuration=replace(ranked.configuration, schedule=bound.plan.schedule))

    def _scheduled(self, ranked: Ranked, cutoff: float) -> Ranked:
        """A result in the order of turns that takes it least; as it is where none can take less than that."""
        limits, machine = self.maker.limits_of(ranked.configuration), self.engine.machine(ranked.configuration)
        if asks(self.request.pinned):
            bound = as_asked(ranked.bound, self.request, machine, limits)
        else:
            bound = fastest_schedule(ranked.bound, machine, limits, cutoff)
        if bound is ranked.bound:
            return ranked  # of which more is known
        configuration = replace(ranked.configuration, schedule=bound.plan.schedule)
        return replace(ranked, bound=bound, configuration=configuration)

    def _ranked(self, found: Contender, ranked: Ranked, cutoff: Seconds = math.inf) -> tuple[Contender, Ranked]:
        """The plan of a contender, or a faster one that takes less than `cutoff`, with what it was made of. The sums of
        the search know the least that messages take: those of weights that go together, and those of buckets, for which
        a full device may have no room. Where that was much too little, other ways to gather weights are priced, too,
        and plans that leave room for buckets, or have none; where it was more, and not for lack of room, plans whose
        blocks cover more of what travels. Of a small model what is found with buckets as large as the links ask for is
        priced, too. Sums hope that a backward pass covers all reductions but the last: where it does not, the best that
        waits for them is priced."""
        overlapped = self._expected(ranked) if self.overlaps else ranked
        expected, engine = found.objective * (1 + _MESSAGES), self.engine
        others = list[tuple[Engine, str, Bytes, float]]()
        if overlapped.seconds - (overlapped.waited if self.overlaps else 0.0) > expected:
            others += [(engine, way, 0.0, 0.0) for way in engine.gathers if way != found.outcome.gathers]
            others += [(*other, 0.0) for other in self._other_buckets(found, ranked)]
        if overlapped.seconds > expected and self._capped(found):
            others += [(engine.with_buckets_of_links, way, 0.0, 0.0) for way in engine.gathers]
        hoped = overlapped.seconds > found.objective * (1 + _HOPED) and not (self.overlaps and self._missing(ranked))
        if hoped and found.pipeline_of_kinds.chain.travels:
            others += [(engine, found.outcome.gathers, 0.0, share) for share in _COVERS]
        reduces = found.pipeline_of_kinds.chain.reduces and overlapped.reduced > REDUCTIONS * overlapped.seconds
        if reduces and overlapped.seconds > expected:
            others.append((engine.waiting, found.outcome.gathers, 0.0, 0.0))
        source = found
        for engine, gathers, room, covering in others:
            least = min(ranked.seconds, cutoff)
            outcome = engine.evaluate_as(gathers, found.configuration, cutoff=least, room=room, covering=covering)
            if outcome.seconds < least:
                contender = replace(engine.contender(found.configuration, outcome), room=found.room)
                other = self.maker.as_found(contender)
                fits = self.maker.fits(other.configuration, other.plan.prediction)
                if fits and self.overlapped(other).seconds < self.overlapped(ranked).seconds:
                    source, ranked = contender, other
                    self._sources[id(source)] = (source, engine, covering)
        return source, ranked

    def _capped(self, found: Contender) -> bool:
        """Whether a model is small, so that sums assume smaller buckets than the links ask for. A message counts as the
        part that it is of a full one, so that either size charges another share of its latency than it takes."""
        pieces, groups = self.engine.pipeline_of_kinds(found.configuration, found.outcome.gathers), self.engine.groups
        tables = pieces.chain.tables
        if self.request.update.buckets != AUTO_BUCKETS or not tables.update.bucketed:
            return False
        return tables.update.bucket_size < max(auto_bucket(tables.mesh, group) for group in groups)

    def _other_buckets(self, found: Contender, ranked: Ranked) -> list[tuple[Engine, str, Bytes]]:
        """Where buckets are left to the search: leaving room for those of the size that it assumed, and without any."""
        assumed, engine = found.pipeline_of_kinds.chain.tables.update, self.engine
        if self.request.update.buckets != AUTO_BUCKETS or not assumed.bucketed:
            return []
        others = [(engine.without_buckets, way, 0.0) for way in engine.gathers]
        own = ranked.plan.training.update
        lacking = self._overfull_by(ranked) + room_of(assumed.bucket_size) - room_of(own.bucket_size)
        if own.bucketed and lacking > 0:  # its buckets are no smaller for their own sake alone
            others += [(engine, way, room_of(assumed.bucket_size)) for way in engine.gathers]
        return others


def _overfull(plans: list[Ranked], limit: float, bound: float) -> OverfullError:
    least = min(plans, key=lambda ranked: ranked.plan.prediction.peak_bytes).plan
    needed, update = least.prediction.peak_bytes, least.training.update
    what, hint = f"schedule = {least.schedule}", "take 1f1b, which holds less, or leave the schedule to the search"
    if update.owned and least.schedule == "1f1b":
        what, hint = f"zero_by = {update.zero_by}", "take slices, of which every device holds as much, or more devices"
    return OverfullError(
        needed - limit,
        bound,
        f"{what}: the leanest plan that was found needs {needed / 2**30:.1f} GiB per device, and there are"
        f" {limit / 2**30:.1f} GiB; {hint}",
    )
