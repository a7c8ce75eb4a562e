"""Other objectives for a finalist: if its step takes longer than its objective, plans that other objectives find are
priced."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hardware_profiles import Bytes, Seconds
from planner.pricing.bucket_size import auto_bucket, room_of
from planner.sharding.update import AHEAD, AUTO_BUCKETS, EACH
from planner.strategy_search.engine.contenders import NEAR, Contender
from planner.strategy_search.engine.engine import Engine
from planner.strategy_search.engine.next_price import REDUCTIONS
from planner.strategy_search.engine.outcome import Outcome, RankFilling
from planner.strategy_search.finalists.orders import Orders
from planner.strategy_search.finalists.overlapping import Overlapping
from planner.strategy_search.finalists.plan_maker import PlanMaker
from planner.strategy_search.finalists.proofs import Ranked
from planner.strategy_search.finalists.room import Room

_MESSAGES = 2e-3
"""Share of a step that communication may take beyond the objective before other plans are tried."""

_HOPED = 0.05
"""Share by which a step may exceed its objective before blocks are looked for that overlap more of their
communication."""

_COVERS = (1.0, 0.25)
"""Values of `covering` (see `Evaluation`) that are tried then."""

IDLE = 0.05
"""A pipeline's stages are tried in a V if it is idle for more than this share of a step: a V leaves some idle time, and
dividing the blocks anew takes as long as before."""


def chosen(ranks: Sequence[RankFilling]) -> Hashable:
    """What ranks run, with the seconds of a micro-batch and of a step of it. If two ways to gather weights give the
    same, they gather nothing and are one plan: weights that a block gathers by itself are in its own seconds, others
    are not."""
    return tuple(
        tuple(
            (
                *(one.kind, one.recompute, one.home, frozenset(one.candidates.items()), one.kept),
                *(one.amounts.part, one.amounts.step, one.amounts.under),
            )
            for one in filling.columns
        )
        for filling in ranks
    )


def _gathers_none(outcome: Outcome) -> bool:
    """Whether the best plan with prefetched weights gathers nothing, whatever memory there is. Then it is the best for
    all ways to gather, as prefetching takes no longer than other ways (see `Engine.evaluate`)."""
    if outcome.gathers != AHEAD or outcome.price or not outcome.ranks:
        return False
    return not any(one.amounts.under for filling in outcome.ranks for one in filling.columns)


@dataclass(kw_only=True)
class OtherSums:
    """Plans of contenders that other objectives find."""

    maker: PlanMaker
    overlapping: Overlapping
    orders: Orders
    room: Room

    def __post_init__(self) -> None:
        self.request, self.engine = self.maker.request, self.maker.engine

    def one_by_one(self, found: Contender, ranked: Ranked, cutoff: Seconds) -> Ranked:
        """A pipeline that stays idle, or the plan found for it with weights gathered one by one, in a faster schedule:
        coalesced gradients are not deferred, and deferred gradients would fill the bubble."""
        idle = ranked.bubble > IDLE * ranked.seconds
        if not idle or found.outcome.gathers == EACH:
            return ranked
        if EACH not in self.engine.gathers:
            return ranked
        best = ranked
        for engine in (self.engine, self.engine.with_buckets_of_links) if self._capped(found) else (self.engine,):
            outcome = engine.evaluate_as(EACH, found.configuration, cutoff=found.objective * (1 + NEAR))
            if outcome.ranks:
                contender = replace(engine.contender(found.configuration, outcome), room=found.room)
                least = min(cutoff, best.seconds)
                other = self.maker.as_found(
                    contender,
                    least,
                    lambda one: one.bubble,
                    partial(self._may_take_settled, least),
                )
                other = self.orders.reordered(other, least)
                if other.seconds < best.seconds and self.maker.storable(other):
                    best = other
        return best

    def best(
        self, found: Contender, ranked: Ranked, cutoff: Seconds = math.inf, roomy: Ranked | None = None
    ) -> tuple[Contender, Ranked]:
        """The plan of a contender, or a faster one that takes less than `cutoff`, with its contender.

        The objective counts the least that communication may take: that of coalesced all-gathers, and that of buckets,
        for which a full device may have no memory. If the step exceeds the objective by `_MESSAGES`, other ways to
        gather weights are priced, and plans that leave memory for buckets, or have none. If it exceeds the objective by
        `_HOPED`, and not for lack of memory, plans whose blocks overlap more communication are priced. For a small
        model the plan with buckets as large as the links need is priced as well. The objective also assumes that a
        backward pass overlaps all reductions but the last; if it does not, the best plan with exposed reductions is
        priced. If a `roomy` plan is given, it leaves memory for overlaps, and only plans that leave as much compete
        with it.
        """
        overlapped = self.overlapping.expected(ranked) if self.overlapping.possible else ranked
        expected, engine = found.objective * (1 + _MESSAGES), self.engine.source_of(found.outcome)
        others = list[tuple[Engine, str, Bytes, float]]()
        if overlapped.seconds - (overlapped.waited if self.overlapping.possible else 0.0) > expected:
            others += [(engine, way, 0.0, 0.0) for way in engine.gathers if way != found.outcome.gathers]
            others += [(*other, 0.0) for other in self._other_buckets(found, ranked)]
        if overlapped.seconds > expected and self._capped(found):
            others += [(engine.with_buckets_of_links, way, 0.0, 0.0) for way in engine.gathers]
        hoped = overlapped.seconds > found.objective * (1 + _HOPED) and not (
            self.overlapping.possible and self.overlapping.missing(ranked)
        )
        if hoped and found.pipeline_of_kinds.chain.travels:
            others += [(engine, found.outcome.gathers, 0.0, share) for share in _COVERS]
        reduces = found.pipeline_of_kinds.chain.reduces and overlapped.reduced > REDUCTIONS * overlapped.seconds
        if reduces and overlapped.seconds > expected:
            others.append((engine.waiting, found.outcome.gathers, 0.0, 0.0))
        source, ranked = (found, ranked) if roomy is None else (roomy.found or found, roomy)
        left = source.room
        known, decided = {(id(engine), chosen(found.outcome.ranks))}, set[tuple[int, Bytes, float]]()
        if _gathers_none(found.outcome):
            decided.add((id(engine), found.room, 0.0))
        for engine, gathers, room, covering in others:
            least = min(ranked.seconds, cutoff)
            room += left
            if (id(engine), room, covering) in decided:
                continue
            outcome = engine.evaluate_as(gathers, found.configuration, cutoff=least, room=room, covering=covering)
            if _gathers_none(outcome):
                decided.add((id(engine), room, covering))
            if outcome.seconds < least and (key := (id(engine), chosen(outcome.ranks))) not in known:
                known.add(key)
                contender = replace(engine.contender(found.configuration, outcome), room=room)
                own = engine is self.engine.source_of(found.outcome) and gathers == found.outcome.gathers
                bound = max(outcome.bound, found.outcome.bound) if own else outcome.bound  # both bounds hold
                other = self.maker.as_found(
                    contender,
                    least,
                    lambda one: one.waited,  # it may be overlapped then
                    partial(self._may_take, least + replace(outcome, bound=bound).open_seconds),
                )
                fits = self.maker.storable(other)
                if fits and self.overlapping.overlapped(other).seconds < self.overlapping.overlapped(ranked).seconds:
                    source, ranked = contender, other
                    self.room.sources[id(source)] = (source, engine, covering)
        return source, ranked

    def _may_take(self, seconds: Seconds, ranked: Ranked) -> bool:
        """Whether a plan may take less than `seconds` in some schedule."""
        return self.room.in_any_order(ranked) < seconds

    def _may_take_settled(self, seconds: Seconds, ranked: Ranked) -> bool:
        """Whether a plan may take less than `seconds` once settled, in a schedule that was priced."""
        return self.maker.may_save(ranked, self.room.least(ranked, seconds) - seconds)

    def _capped(self, found: Contender) -> bool:
        """Whether the model is so small that the objective assumes smaller buckets than the links need. Communication
        counts as its share of a full bucket, so with either size another share of the latency counts than it really
        takes."""
        tables, groups = found.pipeline_of_kinds.chain.tables, self.engine.groups
        if self.request.update.buckets != AUTO_BUCKETS or not tables.update.bucketed:
            return False
        return tables.update.bucket_size < max(auto_bucket(tables.mesh, group) for group in groups)

    def _other_buckets(self, found: Contender, ranked: Ranked) -> list[tuple[Engine, str, Bytes]]:
        """If buckets are left to the search: engines without buckets, and with memory left for buckets of the assumed
        size."""
        assumed, engine = found.pipeline_of_kinds.chain.tables.update, self.engine
        if self.request.update.buckets != AUTO_BUCKETS or not assumed.bucketed:
            return []
        others = [(engine.without_buckets, way, 0.0) for way in engine.gathers]
        own = ranked.plan.training.update
        lacking = self.maker.overfull_by(ranked) + room_of(assumed.bucket_size) - room_of(own.bucket_size)
        if own.bucketed and lacking > 0:  # its buckets are smaller for lack of memory
            others += [(engine, way, room_of(assumed.bucket_size)) for way in engine.gathers]
        return others
