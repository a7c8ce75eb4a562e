"""What sums lack of the step of a finalist: where it takes longer than its sum, plans of other sums are priced."""

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
from planner.strategy_search.engine.orders import Orders
from planner.strategy_search.engine.outcome import Outcome, RankFilling
from planner.strategy_search.engine.overlapping import Overlapping
from planner.strategy_search.engine.plan_maker import PlanMaker
from planner.strategy_search.engine.proofs import Ranked
from planner.strategy_search.engine.room import Room

_MESSAGES = 2e-3
"""Share of a step that messages may take beyond what the search knows of them, before others are tried."""

_HOPED = 0.05
"""Share by which a step may take longer than its sum, before blocks are sought that cover more of what travels."""

_COVERS = (1.0, 0.25)
"""Shares of what travels that count then, whatever covers it."""

IDLE = 0.05
"""Share of a step that a pipeline must be idle, before its stages are tried in a V: some of it is left there, and
dividing them anew takes as long as it took before."""


def chosen(ranks: Sequence[RankFilling]) -> Hashable:
    """What ranks run, and what a micro-batch and a step of that take. Two ways to gather weights that come to the same
    gather none, and are one plan: those that a block gathers by itself are in its own seconds, others are not."""
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
    """Whether the best that gathers weights ahead gathers none, whatever memory there is: then it is the best of all
    ways, as none takes longer ahead (see `Engine.evaluate`)."""
    if outcome.gathers != AHEAD or outcome.price or not outcome.ranks:
        return False
    return not any(one.amounts.under for filling in outcome.ranks for one in filling.columns)


@dataclass(kw_only=True)
class OtherSums:
    """Plans of contenders that other sums find."""

    maker: PlanMaker
    overlapping: Overlapping
    orders: Orders
    room: Room

    def __post_init__(self) -> None:
        self.request, self.engine = self.maker.request, self.maker.engine

    def one_by_one(self, found: Contender, ranked: Ranked, cutoff: Seconds) -> Ranked:
        """A pipeline that stays idle, or what is found for it with weights gathered one by one, in an order
        that takes less: gradients that go together are not deferred, which would fill the bubble."""
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
                if other.seconds < best.seconds and self.maker.fits(other.configuration, other.plan.prediction):
                    best = other
        return best

    def best(
        self, found: Contender, ranked: Ranked, cutoff: Seconds = math.inf, roomy: Ranked | None = None
    ) -> tuple[Contender, Ranked]:
        """The plan of a contender, or a faster one that takes less than `cutoff`, with what it was made of. The sums of
        the search know the least that messages take: those of weights that go together, and those of buckets, for which
        a full device may have no room. Where that was much too little, other ways to gather weights are priced, too,
        and plans that leave room for buckets, or have none; where it was more, and not for lack of room, plans whose
        blocks cover more of what travels. Of a small model what is found with buckets as large as the links ask for is
        priced, too. Sums hope that a backward pass covers all reductions but the last: where it does not, the best that
        waits for them is priced. What leaves room for overlaps is to be beaten by what leaves as much, where a
        `roomy` plan is given."""
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
                bound = max(outcome.bound, found.outcome.bound) if own else outcome.bound  # of fewer plans, or as many
                other = self.maker.as_found(
                    contender,
                    least,
                    lambda one: one.waited,  # perhaps not any more
                    partial(self._may_take, least + replace(outcome, bound=bound).open_seconds),
                )
                fits = self.maker.fits(other.configuration, other.plan.prediction)
                if fits and self.overlapping.overlapped(other).seconds < self.overlapping.overlapped(ranked).seconds:
                    source, ranked = contender, other
                    self.room.sources[id(source)] = (source, engine, covering)
        return source, ranked

    def _may_take(self, seconds: Seconds, ranked: Ranked) -> bool:
        """Whether a result may take less in some order of turns."""
        return self.room.in_any_order(ranked) < seconds

    def _may_take_settled(self, seconds: Seconds, ranked: Ranked) -> bool:
        """Whether a result may take less settled, in an order of turns that was priced."""
        return self.maker.may_save(ranked, self.room.least(ranked, seconds) - seconds)

    def _capped(self, found: Contender) -> bool:
        """Whether a model is small, so that sums assume smaller buckets than the links ask for. A message counts as the
        part that it is of a full one, so that either size charges another share of its latency than it takes."""
        tables, groups = found.pipeline_of_kinds.chain.tables, self.engine.groups
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
        lacking = self.maker.overfull_by(ranked) + room_of(assumed.bucket_size) - room_of(own.bucket_size)
        if own.bucketed and lacking > 0:  # its buckets are no smaller for their own sake alone
            others += [(engine, way, room_of(assumed.bucket_size)) for way in engine.gathers]
        return others
