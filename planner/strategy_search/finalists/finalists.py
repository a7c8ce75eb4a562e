"""The best contenders as plans: settled, bound to their graph, priced by `predict`, each in its fastest schedule.

The search ranks configurations by their objectives. The few that may be the fastest are priced here as whole plans.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TypeAlias

from costmodels import SCHEDULES, schedule_orders
from hardware_profiles import Seconds
from hardware_profiles.units import bytes_text
from planner.errors import InfeasibleError, LimitError
from planner.faults import Fault
from planner.limits import reached, reading, seconds_left
from planner.plan.layout.offloaded import beyond_host, offloaded_fault
from planner.sharding.update import EACH
from planner.strategy_search.engine.contenders import Contender
from planner.strategy_search.engine.engine import Engine
from planner.strategy_search.engine.product_overlap import OverlapError
from planner.strategy_search.engine.scheduling import (
    IN_A_V,
    WORTH,
    asks,
    may_lie_in_a_v,
    reorders,
    runs_in_order,
    turns_may_cover,
)
from planner.strategy_search.finalists.orders import Orders
from planner.strategy_search.finalists.other_sums import IDLE, OtherSums
from planner.strategy_search.finalists.overlapping import Overlapping
from planner.strategy_search.finalists.plan_maker import PlanMaker
from planner.strategy_search.finalists.proofs import OPTIMAL, Ranked
from planner.strategy_search.finalists.room import Room
from planner.strategy_search.request.space import Configuration

_MESSAGES = 2e-3
"""Share of a step that communication may take beyond the objective before other plans are tried."""

_OVERLAPPED = 5e-3
"""Share by which a step may exceed its objective before plans with exposed tensor parallelism are looked for."""

_WIDE = 0.04
"""Gap of the fastest plan from which on one that recomputes all blocks is tried."""

_TURNED = 2
"""Maximum number of results whose stages are tried in a V."""


_DEGREES = 3
"""Maximum number of pipeline degrees that are tried in a V besides those of the results."""

Laying: TypeAlias = tuple[Configuration, str]
"""A configuration with its stages in a V, and its way to gather weights."""


class OverfullError(Exception):
    """The plans found need `excess` bytes more than there are. The search counts too little memory for a schedule that
    holds more than 1F1B, and only the mean of states that are sharded by whole parameters. No plan has an objective
    below `bound` seconds. The leanest plan found has a peak of `needed` bytes, if any plan has everything that is asked
    for."""

    def __init__(self, excess: float, bound: float, message: str, needed: float | None = None) -> None:
        super().__init__(message)
        self.excess, self.bound, self.message, self.needed = excess, bound, message, needed


class FullHostError(OverfullError):
    """The plans found keep `excess` bytes more on the host than it has: the search counts what 1F1B keeps there."""


@dataclass(kw_only=True)
class Finalists:
    """Contenders `found` by the search, and the plans that `maker` makes of them. A plan that is `known` has to be
    beaten. If no plan that would beat it fits, it is taken if that `settles` the search. Beside the first, plans of
    `limit` seconds or more are of no interest."""

    maker: PlanMaker
    found: Sequence[Contender]
    known: Ranked | None = None
    settles: bool = False
    limit: Seconds = math.inf
    of_degrees: Sequence[tuple[Seconds, Configuration]] = ()
    """For each pipeline degree, the configuration that would take least without a bubble, with the seconds it would
    take."""

    def __post_init__(self) -> None:
        self.request, self.engine = self.maker.request, self.maker.engine
        self.overlapping = Overlapping(maker=self.maker)
        self.orders = Orders(maker=self.maker, overlapping=self.overlapping)
        self.room = Room(maker=self.maker, overlapping=self.overlapping, orders=self.orders)
        self.sums = OtherSums(maker=self.maker, overlapping=self.overlapping, orders=self.orders, room=self.room)
        self._known: dict[int, tuple[Contender, Ranked]] = {}  # by id
        self._waited = set[int]()  # known contenders, by id, that were tried with exposed collectives
        self._before: dict[int, Ranked] = {}  # known plans without overlaps
        self._recomputed = set[int]()  # contenders, by id, that were tried with all blocks recomputed
        self._settled: dict[int, Ranked] = {}  # of contenders, by id
        self._turned: dict[int, tuple[Ranked, Ranked]] = {}
        self._known_in_a_v: dict[Laying, Ranked | None] = {}
        self._one_by_one: dict[Configuration, Ranked | None] = {}

    def plans(self, *, settle: bool = True, rival: Seconds = math.inf) -> tuple[Ranked, ...]:
        """The fastest of the contenders, fastest first; contenders that cannot be among them are not priced. They are
        settled, and tried with their stages in a V, unless `settle` is False, when only their seconds matter. `rival`:
        the lowest objective of contenders that are not in `found`."""
        top, plans, known = self.request.top, list[Ranked](), self.known
        fitting = [] if known is None else [known]
        longest = 0.0  # seconds to make a plan of a contender
        refusal: OverlapError | None = None
        beside: Fault | None = None  # of plans that fit on the devices
        excess = math.inf  # of these on the host
        # known plans set the pace for others; then the lowest objective
        ordered = sorted(self.found, key=lambda found: (id(found) not in self._known, found.objective, found.order))
        for found in ordered:
            slowest = min(fitting[top - 1].seconds, self.limit) if len(fitting) >= top else math.inf
            if self._least_step(found) >= slowest * (1 - OPTIMAL):
                continue
            if plans and (reached() or seconds_left() < longest):
                break
            began = reading()
            try:
                ranked = self._priced_once(found, slowest)
            except OverlapError as error:  # nothing has the chunks asked for, or no memory for them
                refusal = error if refusal is None or error.needed > refusal.needed == 0.0 else refusal
                continue
            longest = max(longest, reading() - began)
            plans.append(ranked)
            if self.maker.storable(ranked):
                fitting = sorted([*fitting, ranked], key=lambda ranked: ranked.seconds)
            elif self.maker.overfull_by(ranked) <= 0:
                beside = beside or offloaded_fault(ranked.plan.prediction, self.request.cluster)
                excess = min(excess, beyond_host(ranked.plan.prediction, self.request.cluster))
        if refusal is not None and not plans and not fitting:
            raise OverfullError(refusal.needed, self.maker.bound, str(refusal)) if refusal.needed else refusal
        if beside is not None and not fitting:
            message = f"{self.request.model.reference} does not fit beside the devices: {beside}"
            raise FullHostError(excess, self.maker.bound, message) if excess > 0 else InfeasibleError(message)
        if fitting and fitting[0].seconds <= rival:
            fitting = self._with_waiting(fitting)
        beaten = known is None or (fitting[0] is known and any(one.seconds < known.seconds for one in plans))
        if not fitting or (beaten and known is not None and not self.settles):
            raise _overfull(plans, self.maker.limits[0], self.maker.bound)
        if settle:
            fitting = self._with_all_recomputed(self._with_settled(ordered, fitting))
        best, *others = fitting
        if seconds_left() >= longest and best is not known:
            turned = self._with_turns(best)
            best = self._in_a_v(turned) if settle else turned
            if best is not turned:  # it is another configuration and does not replace the first
                others = [turned, *others]
        return tuple(sorted([best, *others[: top - 1]], key=lambda ranked: ranked.seconds))

    def _with_settled(self, ordered: Sequence[Contender], fitting: list[Ranked]) -> list[Ranked]:
        """The plans of contenders, fastest first. Those that may be among the fastest once settled are settled.
        Settling saves at most the gap between a plan's objective and the bound of its configuration, plus the gap
        between step and objective."""
        top = self.request.top
        kept = {id(ranked): ranked for ranked in fitting}
        priced = [found for found in ordered if id(found) in self._known and id(self._known[id(found)][1]) in kept]
        for found in sorted(priced, key=lambda found: self._known[id(found)][1].seconds):
            ranked = self._known[id(found)][1]
            slowest = sorted(one.seconds for one in kept.values())[:top][-1]
            settled = self._settled_once(found, slowest)
            kept[id(ranked)] = settled
        return sorted(kept.values(), key=lambda ranked: ranked.seconds)

    def _settled_once(self, found: Contender, cutoff: Seconds) -> Ranked:
        """The plan of a contender, settled if it may take less than `cutoff` then, or if a solver is to be asked about
        it."""
        overlapped = self._known[id(found)][1]
        before = self._before[id(overlapped)]
        if id(found) in self._settled or before.found is None or before.settled:
            return overlapped
        objective = before.found.objective
        least = min(overlapped.seconds, objective) - before.found.outcome.open_seconds
        asked = self.request.certify or self.request.algorithm != "dynamic_programming"
        if least >= cutoff and not (asked and overlapped.seconds <= cutoff):
            return overlapped
        settled = self._settled[id(found)] = self.maker.settled(before)
        certified = replace(overlapped, certificate=settled.certificate)
        if settled.bound is not before.bound:
            with contextlib.suppress(LimitError, OverlapError):  # the overlaps asked for fit with the unsettled plan
                settled = self.orders.reordered(settled, cutoff) if reorders(self.request.pinned) else settled
                other = self.overlapping.overlapped(settled)
                if self.maker.storable(other) and other.seconds < overlapped.seconds:
                    certified, before = other, settled
        self._before[id(certified)] = before
        self._known[id(found)] = (found, certified)
        return certified

    def _with_all_recomputed(self, fitting: list[Ranked]) -> list[Ranked]:
        """The plans, fastest first. If the fastest recomputes only some of its blocks and its gap is wide, a settled
        plan of the same configuration that recomputes all of them replaces it where that is faster. Prices of memory
        may find no way to run a block between two that are far apart, and settling does not change how many blocks are
        recomputed."""
        best, *others = fitting
        found = best.found
        if found is None or id(found) in self._recomputed or found.outcome.bound >= best.seconds * (1 - _WIDE):
            return fitting
        ways = {column.recompute for rank in found.outcome.ranks for column in rank.inner}
        pinned = self.request.pinned
        if len(ways) == 1 or pinned.recompute is not None or pinned.pattern is not None:
            return fitting
        self._recomputed.add(id(found))
        engine, c = self.engine.recomputing, found.configuration
        with contextlib.suppress(LimitError):  # then the fastest stays
            outcome = engine.evaluate_as(found.outcome.gathers, c, hint=(found.outcome.price, found.outcome.under))
            if outcome.ranks:
                other = self.maker.settled(self.maker.unsettled(engine.contender(c, outcome)))
                faster = self.overlapping.overlapped(other)
                if faster.seconds < best.seconds and self.maker.storable(faster):
                    self._before[id(faster)] = other
                    self._known[id(found)] = (found, faster)
                    return sorted([faster, *others], key=lambda ranked: ranked.seconds)
        return fitting

    def _least_step(self, found: Contender) -> Seconds:
        """A lower bound on the step time of all plans of a contender."""
        idle = found.objective - found.work > IDLE * found.objective
        if idle and found.configuration.pipeline > 1 and may_lie_in_a_v(self.request):  # tried in a V, if priced
            return found.work
        least = found.least_step(any_order=reorders(self.request.pinned))
        if found.configuration.virtual_stages > 1:  # there is only one schedule
            return max(least, found.sum_with(found.outcome.ranks))
        return max(least, found.outcome.bound) if runs_in_order(self.request, found.configuration) else least

    def _priced_once(self, found: Contender, cutoff: float) -> Ranked:
        """The plan of a contender in its fastest schedule, as far as that may take less than `cutoff`, and with its
        overlaps. Raises RequestError if it cannot have the chunks that are asked for."""
        if id(found) not in self._known:
            ranked = self._best_of(found, cutoff)
            overlapped = self.overlapping.overlapped(ranked)
            self._before[id(overlapped)] = ranked
            self._known[id(found)] = (found, overlapped)
        return self._known[id(found)][1]

    def _best_of(self, found: Contender, cutoff: Seconds) -> Ranked:
        """The best plan of a contender, without its overlaps.

        If the overlaps lack memory, plans that leave memory for them are tried first; few other plans matter then. If
        the plan would take `cutoff` or longer even with all overlaps and unlimited memory, only plans of other
        objectives are tried. The plan is not settled if settling would not save enough to get below `cutoff`.
        """
        ranked = self.maker.unsettled(found)
        if self.room.in_any_order(ranked) < cutoff + found.outcome.open_seconds and self._may_win(ranked, cutoff):
            ranked = self.maker.worth_settling(ranked)
        if not self.overlapping.possible or not self.overlapping.missing(ranked):
            return self._finished(*self.sums.best(found, ranked, self._sum_for(found, cutoff)), cutoff)
        if self._too_slow(ranked, cutoff):
            source, other = self.sums.best(found, ranked, cutoff)
            if other is not ranked:
                return self._finished(source, other, cutoff)
            self.overlapping.leave(ranked)
            return ranked
        roomy = self._finished(found, ranked, cutoff)
        least = self.overlapping.overlapped(roomy).seconds
        if least <= found.objective * (1 + _MESSAGES):
            return roomy
        source, other = self.sums.best(found, ranked, min(least, cutoff), roomy)
        if other is roomy:
            return roomy
        return min(
            roomy, self._finished(source, other, cutoff), key=lambda one: self.overlapping.overlapped(one).seconds
        )

    def _may_win(self, ranked: Ranked, cutoff: Seconds) -> bool:
        """Whether a plan may take less than `cutoff` once it is settled, with all its overlaps, in some schedule of
        whole stages with one on each rank."""
        return cutoff == math.inf or self.maker.may_save(ranked, self.room.least(ranked, cutoff) - cutoff)

    def _with_waiting(self, fitting: list[Ranked]) -> list[Ranked]:
        """The plans, fastest first. The fastest is replaced by a plan of the same configuration with exposed
        collectives of tensor parallelism if that is faster; tried once for each."""
        best, *others = fitting
        found = next((found for found, ranked in self._known.values() if ranked is best), None)
        if found is None or id(found) in self._waited:
            return fitting
        self._waited.add(id(found))
        waiting = None
        with contextlib.suppress(LimitError):  # then the fastest stays
            waiting = self._waiting_for_collectives(found, best)
        if waiting is None:
            return fitting
        faster = self.overlapping.overlapped(waiting)
        self._before[id(faster)], self._known[id(found)] = waiting, (found, faster)
        return sorted([faster, *others], key=lambda ranked: ranked.seconds)

    def _waiting_for_collectives(self, found: Contender, overlapped: Ranked) -> Ranked | None:
        """The best plan of a contender's configuration with exposed collectives of tensor parallelism, if that is
        faster than the plan with overlaps. Objectives of such plans are exact, the others assume that everything
        overlaps."""
        least, configuration = overlapped.seconds, found.configuration
        hopes = self.request.pinned.tensor_overlap is None and self.engine.overlapped
        hopes = hopes and self.request.algorithm != "recursive_programming"  # it decides axis by axis
        if not hopes or least <= found.objective * (1 + _OVERLAPPED):
            return None
        own = self._without_overlap
        outcome = own.engine.evaluate(configuration, cutoff=least)
        if not outcome.ranks or outcome.seconds >= least:
            return None
        other = own._best_of(own.engine.contender(configuration, outcome), least)
        return other if own.overlapping.overlapped(other).seconds < least and self.maker.storable(other) else None

    @cached_property
    def _without_overlap(self) -> "Finalists":
        """Makes plans with exposed collectives of tensor parallelism."""
        return self._asking(self.engine.without_overlap)

    def _asking(self, engine: Engine) -> "Finalists":
        """Makes plans of the contenders of another engine, for the request of that engine."""
        return Finalists(maker=replace(self.maker, request=engine.request, engine=engine), found=())

    def _sum_for(self, found: Contender, cutoff: Seconds) -> Seconds:
        """The highest objective with which a plan of a contender may still take `cutoff` in some schedule."""
        least = found.least_step(any_order=reorders(self.request.pinned))
        return cutoff * max(1.0, found.objective / least) if least > 0 else math.inf

    def _too_slow(self, ranked: Ranked, cutoff: Seconds) -> bool:
        """Whether a plan whose overlaps lack memory would take `cutoff` or longer with all of them and unlimited
        memory."""
        if cutoff == math.inf or not self.overlapping.possible or not self.overlapping.missing(ranked):
            return False
        return self.room.hoped(ranked) >= cutoff

    def _finished(self, found: Contender, ranked: Ranked, cutoff: Seconds) -> Ranked:
        """The plan of a contender in its fastest schedule, found again with less memory if needed and with memory left
        for its overlaps; unchanged if none of that may take less than `cutoff`."""
        if reorders(self.request.pinned):
            with contextlib.suppress(LimitError):  # else the schedule of the search
                ranked = self.sums.one_by_one(found, self.orders.reordered(ranked, cutoff), cutoff)
        if not self._may_win(ranked, cutoff):
            return ranked
        if self.overlapping.possible and self.maker.overfull_by(ranked) > 0 and self.overlapping.missing(ranked):
            roomy = self.room.with_room(found, ranked, cutoff)
            if not self.maker.storable(roomy):  # without overlaps it may fit and still win
                return self.room.lean(found, ranked, cutoff) if ranked.seconds < cutoff else roomy
            seconds = self.overlapping.overlapped(roomy).seconds
            if seconds <= self.room.hoped(ranked) * (1 + WORTH):
                return roomy
            other = self.room.lean(found, ranked, min(cutoff, seconds))  # less memory, fewer overlaps
            faster = self.maker.storable(other) and self.overlapping.overlapped(other).seconds < seconds
            return other if faster else roomy
        return self.room.lean(found, ranked, cutoff)

    @property
    def priced(self) -> tuple[Ranked, ...]:
        """Contenders that `plans` has priced, without those that do not fit."""
        known = (ranked for _, ranked in self._known.values())
        return tuple(one for one in known if self.maker.storable(one))

    def plain(self, found: Contender) -> Ranked | None:
        """A contender as it was found, as a plan in its fastest schedule; None if it does not fit."""
        ranked = self.maker.settled(self.maker.unsettled(found))
        pinned = self.request.pinned
        if asks(pinned) or (found.configuration.pipeline > 1 and reorders(pinned)):
            ranked = self.orders.scheduled(ranked, math.inf)
        return self.overlapping.overlapped(ranked) if self.maker.storable(ranked) else None

    def _with_turns(self, overlapped: Ranked) -> Ranked:
        """A plan with interleaved micro-batches, or slices of the sequence, if that is faster; if needed with weights
        gathered one by one. Nothing else overlaps then."""
        if id(overlapped) not in self._turned:
            self._turned[id(overlapped)] = (overlapped, self._fastest_turns(overlapped))
        return self._turned[id(overlapped)][1]

    def _fastest_turns(self, overlapped: Ranked) -> Ranked:
        if (self.request.pinned.tensor_overlap or 0) > 1:
            return overlapped
        ranked = self._before[id(overlapped)]
        with contextlib.suppress(LimitError):
            configuration, best = ranked.configuration, self.orders.in_turns(ranked, overlapped.seconds)
            machine = self.engine.machine(configuration)
            if EACH in self.engine.gathers and turns_may_cover(ranked.bound, self.request.pinned, machine):
                one_by_one = self._gathered_one_by_one(configuration)
                if one_by_one is not None:
                    best = self._in_faster_turns(one_by_one, best, min(overlapped.seconds, best.seconds))
            turns = best.plan.training.interleave > 1 or best.plan.slices > 1
            return min(overlapped, best if turns else self.overlapping.overlapped(best), key=lambda one: one.seconds)
        return overlapped

    def _gathered_one_by_one(self, configuration: Configuration) -> Ranked | None:
        """The plan of a configuration whose weights are gathered one by one, as it was found; None if none fits."""
        if configuration not in self._one_by_one:
            outcome = self.engine.evaluate_as(EACH, configuration)
            self._one_by_one[configuration] = None
            if outcome.ranks:
                found = self.engine.contender(configuration, outcome)
                made = self.maker.made(found, outcome.ranks)
                plain = Ranked(bound=made, configuration=configuration, memory_price=outcome.price, found=found)
                self._one_by_one[configuration] = plain
        return self._one_by_one[configuration]

    def _in_faster_turns(self, plain: Ranked, best: Ranked, cutoff: Seconds) -> Ranked:
        """A plan as it was found with interleaved micro-batches, or `best` if that is as fast. A plan that wins is
        settled."""
        turned = self.orders.in_turns(plain, cutoff)
        if turned.seconds >= best.seconds * (1 - WORTH) or not self.maker.storable(turned):
            return best
        assert plain.found is not None, "plans of other sources are not tried"
        settled = self.orders.in_turns(self.maker.settled(self.maker.unsettled(plain.found)), cutoff)
        return settled if settled.seconds < turned.seconds and self.maker.storable(settled) else turned

    def _in_a_v(self, best: Ranked) -> Ranked:
        """The best plan, or a faster one with two stages on each rank in a V, whose schedules have next to no bubble.
        Tried for the results that would be faster without their bubble."""
        if not may_lie_in_a_v(self.request):
            return best
        bubbles = [
            (ranked.bubble, number, found, ranked)
            for number, (found, ranked) in enumerate(self._known.values())
            if 1 < found.configuration.pipeline <= self.engine.template.blocks.count // 2
        ]
        hopeful = sorted(
            (ranked.seconds - bubble, number, found)
            for bubble, number, found, ranked in bubbles
            if bubble > IDLE * ranked.seconds
        )
        # plans with several stages on each rank and with one are divided anew into the same
        distinct = {_in_order(one[2], IN_A_V[0]): one for one in reversed(hopeful)}
        for (least, _, found), schedule in product(sorted(distinct.values())[:_TURNED], IN_A_V):
            best = self._laid(least, _in_order(found, schedule), best)
        for least, key in self._of_other_degrees(best):
            best = self._laid(least, key, best)
        return best

    def _of_other_degrees(self, best: Ranked) -> list[tuple[Seconds, Laying]]:
        """Pipelines of degrees that were not tried, in a schedule whose passes run together and overlap each other's
        exchanges of experts. What the objective counts as exposed may be overlapped there, so no objective says which
        degree is best."""
        if not self.engine.has_experts:
            return []
        tried = {configuration.pipeline for configuration, _ in self._known_in_a_v}
        others = [(least - best.waited, c) for least, c in self.of_degrees[:_DEGREES] if c.pipeline not in tried]
        deep = self.engine.template.blocks.count // 2
        gathers = best.plan.training.update.gathers if best.found is None else best.found.outcome.gathers
        together = [schedule for schedule in IN_A_V if SCHEDULES[schedule].paired]
        return [
            (least, (replace(c, schedule=schedule), gathers))
            for least, c in others
            if 1 < c.pipeline <= deep
            for schedule in together
        ]

    def _laid(self, least: Seconds, key: Laying, best: Ranked) -> Ranked:
        """The best plan, or a faster one in a V, of this configuration or of earlier contenders. The configuration is
        tried if its lower bound `least` says that it may be faster."""
        if least < best.seconds * (1 - WORTH) and not reached() and not self._laid_alike(key[0]):
            with contextlib.suppress(LimitError):
                self._laid_in_a_v(key, best)
        known = (laid for laid in self._known_in_a_v.values() if laid is not None)
        laid = min(known, key=lambda ranked: ranked.seconds, default=best)
        return laid if laid.seconds < best.seconds * (1 - WORTH) else best

    def _laid_alike(self, configuration: Configuration) -> bool:
        """Whether a schedule has the same order as an earlier one, as with few micro-batches, and no passes that run
        together."""
        p, m, schedule = configuration.pipeline, configuration.micro_batches, configuration.schedule
        if self.engine.has_experts and SCHEDULES[schedule].paired:
            return False
        turns = schedule_orders(schedule, p, m, virtual=2)
        return any(schedule_orders(one, p, m, virtual=2) == turns for one in IN_A_V[: IN_A_V.index(schedule)])

    def _laid_in_a_v(self, key: Laying, best: Ranked) -> None:
        """Note the plan of a configuration with its stages in a V; None if it is no faster than the best, or does not
        fit."""
        if key not in self._known_in_a_v:
            self._known_in_a_v[key] = self._divided_for_a_v(*key, best)

    def _divided_for_a_v(self, configuration: Configuration, gathers: str, best: Ranked) -> Ranked | None:
        own, p, m, cutoff = self._in_order_of_a_v, configuration.pipeline, configuration.micro_batches, best.seconds
        passes_run_together = SCHEDULES[configuration.schedule].paired and self.engine.has_experts
        covered = best.waited if passes_run_together else 0.0
        longer = (cutoff + covered) * (m + p - 1) / m  # objectives have the bubble of 1F1B and exposed exchanges
        outcome = own.engine.evaluate_as(gathers, configuration, cutoff=longer)
        if not outcome.ranks:
            return None
        divided = own.engine.contender(configuration, outcome)
        if divided.busy >= cutoff * (1 - WORTH) and not passes_run_together:
            return None
        ranked = own.overlapping.overlapped(own._best_of(divided, cutoff))
        return ranked if own.maker.storable(ranked) else None

    @cached_property
    def _in_order_of_a_v(self) -> "Finalists":
        """Makes plans where a V is asked for: nothing overlaps with its matrix products, so layouts differ."""
        return self._asking(self.engine.in_a_v)


def _in_order(found: Contender, schedule: str) -> Laying:
    """The key under which a contender is divided anew in a schedule with stages in a V: its configuration with that
    schedule, and its way to gather weights."""
    return replace(found.configuration, virtual_stages=1, uneven=False, schedule=schedule), found.outcome.gathers


def _overfull(plans: list[Ranked], limit: float, bound: float) -> OverfullError:
    least = min(plans, key=lambda ranked: ranked.plan.prediction.peak_bytes).plan
    needed, update = least.prediction.peak_bytes, least.training.update
    what, hint = "", ""
    if least.schedule != "1f1b":
        what = f"schedule = {least.schedule}: "
        hint = "; take 1f1b, which holds less, or leave the schedule to the search"
    elif update.owned:
        what = f"zero_by = {update.zero_by}: "
        hint = "; take slices, of which every device holds as much, or more devices"
    return OverfullError(
        needed - limit,
        bound,
        f"{what}the leanest plan that was found needs {bytes_text(needed - limit)} more than the {bytes_text(limit)}"
        f" available on a device{hint}",
        needed,
    )
