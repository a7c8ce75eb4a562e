"""The best contenders as plans: settled, bound to their graph, priced by the judge, each in its fastest order of turns.

The search ranks what it finds by sums. Those few that may be the fastest are priced here as what they are: whole plans.
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
from planner.errors import InfeasibleError, LimitError
from planner.limits import reached, reading, seconds_left
from planner.plan.layout.offloaded import offloaded_fault
from planner.sharding.update import EACH
from planner.strategy_search.engine.contenders import Contender
from planner.strategy_search.engine.engine import Engine
from planner.strategy_search.engine.orders import Orders
from planner.strategy_search.engine.other_sums import IDLE, OtherSums
from planner.strategy_search.engine.overlapping import Overlapping
from planner.strategy_search.engine.plan_maker import PlanMaker
from planner.strategy_search.engine.product_overlap import OverlapError
from planner.strategy_search.engine.proofs import OPTIMAL, Ranked
from planner.strategy_search.engine.room import Room
from planner.strategy_search.engine.scheduling import (
    IN_A_V,
    WORTH,
    asks,
    may_lie_in_a_v,
    reorders,
    runs_in_order,
    turns_may_cover,
)
from planner.strategy_search.request.space import Configuration

_MESSAGES = 2e-3
"""Share of a step that messages may take beyond what the search knows of them, before others are tried."""

_OVERLAPPED = 5e-3
"""Share by which a step may take longer than its sum, before plans are sought that wait for tensor parallelism."""

_TURNED = 2
"""Results whose stages are tried in a V, at most."""


_DEGREES = 3
"""Pipeline degrees that are tried in a V beside those of the results, at most."""

Laying: TypeAlias = tuple[Configuration, str]
"""A configuration with its stages in a V, and its way to gather weights."""


class OverfullError(Exception):
    """What was found holds more than there is, by so many bytes: the sums of the search count what a schedule that
    holds more than 1F1B keeps for too little, and of states that are shared out by whole parameters the mean. No plan
    takes less than `bound` seconds by its objective. The leanest plan that was found has a peak of `needed` bytes, if
    any has all that is asked for."""

    def __init__(self, excess: float, bound: float, message: str, needed: float | None = None) -> None:
        super().__init__(message)
        self.excess, self.bound, self.message, self.needed = excess, bound, message, needed


@dataclass(kw_only=True)
class Finalists:
    """Contenders `found` by the search, and what `maker` makes of them. A plan that is `known` has to be beaten; where
    nothing that would beat it fits, it is taken if that `settles` it."""

    maker: PlanMaker
    found: Sequence[Contender]
    known: Ranked | None = None
    settles: bool = False
    of_degrees: Sequence[tuple[Seconds, Configuration]] = ()
    """Of each pipeline degree the configuration that would take least without a bubble, with what it would take."""

    def __post_init__(self) -> None:
        self.request, self.engine = self.maker.request, self.maker.engine
        self.overlapping = Overlapping(maker=self.maker)
        self.orders = Orders(maker=self.maker, overlapping=self.overlapping)
        self.room = Room(maker=self.maker, overlapping=self.overlapping, orders=self.orders)
        self.sums = OtherSums(maker=self.maker, overlapping=self.overlapping, orders=self.orders, room=self.room)
        self._known: dict[int, tuple[Contender, Ranked]] = {}  # by identity
        self._waited = set[int]()  # contenders that are known, by identity, tried so
        self._before: dict[int, Ranked] = {}  # of what is known, without overlaps
        self._settled: dict[int, Ranked] = {}  # of contenders, by identity
        self._turned: dict[int, tuple[Ranked, Ranked]] = {}
        self._known_in_a_v: dict[Laying, Ranked | None] = {}

    def plans(self, *, settle: bool = True, rival: Seconds = math.inf) -> tuple[Ranked, ...]:
        """The fastest of the contenders, fastest first; those that cannot be among them are not priced. Unless it is
        for their seconds alone, they are settled. `rival`: the least sum of contenders that are not among them."""
        top, plans, known = self.request.top, list[Ranked](), self.known
        fitting = [] if known is None else [known]
        longest = 0.0  # seconds to make a plan of one
        refusal: OverlapError | None = None
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
            except OverlapError as error:  # this one has nothing that could be in so many, or no room for it
                refusal = error if refusal is None or error.needed > refusal.needed == 0.0 else refusal
                continue
            longest = max(longest, reading() - began)
            plans.append(ranked)
            if self.maker.fits(ranked.configuration, ranked.plan.prediction):
                fitting = sorted([*fitting, ranked], key=lambda ranked: ranked.seconds)
        if refusal is not None and not plans and not fitting:
            raise OverfullError(refusal.needed, self.maker.bound, str(refusal)) if refusal.needed else refusal
        if fitting and fitting[0].seconds <= rival:
            fitting = self._with_waiting(fitting)
        beaten = known is None or (fitting[0] is known and any(one.seconds < known.seconds for one in plans))
        if not fitting or (beaten and known is not None and not self.settles):
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
        if seconds_left() >= longest and best is not known:
            turned = self._with_turns(best)
            best = self._in_a_v(turned)
            if best is not turned:  # which is another configuration, in whose place it is not
                others = [turned, *others]
        return tuple(sorted([best, *others[: top - 1]], key=lambda ranked: ranked.seconds))

    def _with_settled(self, ordered: Sequence[Contender], fitting: list[Ranked]) -> list[Ranked]:
        """The plans of contenders, fastest first, with those settled that may be among the fastest so: what a plan may
        save is what its sum is above what no plan of its configuration takes less than, and what its step is above its
        sum."""
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
        """The plan of a contender, settled as far as it may take less than `cutoff` then, or a solver is asked about
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
            with contextlib.suppress(LimitError, OverlapError):  # what is asked for has room beside the other
                settled = self.orders.reordered(settled, cutoff) if reorders(self.request.pinned) else settled
                other = self.overlapping.overlapped(settled)
                if self.maker.storable(other) and other.seconds < overlapped.seconds:
                    certified, before = other, settled
        self._before[id(certified)] = before
        self._known[id(found)] = (found, certified)
        return certified

    def _least_step(self, found: Contender) -> Seconds:
        """No plan of a contender takes less."""
        idle = found.objective - found.work > IDLE * found.objective
        if idle and found.configuration.pipeline > 1 and may_lie_in_a_v(self.request):  # it is tried in a V, if priced
            return found.work
        least = found.least_step(any_order=reorders(self.request.pinned))
        if found.configuration.virtual_stages > 1:  # of which there is one order
            return max(least, found.sum_with(found.outcome.ranks))
        return max(least, found.outcome.bound) if runs_in_order(self.request, found.configuration) else least

    def _priced_once(self, found: Contender, cutoff: float) -> Ranked:
        """A contender as a plan, in an order of turns that takes it least, as far as it may take less than `cutoff`,
        and with what runs under its products. Raises RequestError where chunks are asked for that it cannot have."""
        if id(found) not in self._known:
            ranked = self._best_of(found, cutoff)
            overlapped = self.overlapping.overlapped(ranked)
            self._before[id(overlapped)] = ranked
            self._known[id(found)] = (found, overlapped)
        return self._known[id(found)][1]

    def _best_of(self, found: Contender, cutoff: Seconds) -> Ranked:
        """The best plan of a contender, without its overlaps. Where these lack memory, plans that leave room for them
        are looked for first: beside what is found so, few of the others are of interest. Where not even with all of
        them, whatever memory there is, it would take less than `cutoff`, only plans of other sums are looked for; nor
        is it settled where that would not save as much."""
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
        """Whether a result may take less than `cutoff` settled, with all its overlaps, in some order of whole stages,
        one on each rank."""
        return cutoff == math.inf or self.maker.may_save(ranked, self.room.least(ranked, cutoff) - cutoff)

    def _with_waiting(self, fitting: list[Ranked]) -> list[Ranked]:
        """Plans, fastest first, with the fastest one as it is where tensor parallelism waits for its collectives, if
        that is faster; tried once for each."""
        best, *others = fitting
        found = next((found for found, ranked in self._known.values() if ranked is best), None)
        if found is None or id(found) in self._waited:
            return fitting
        self._waited.add(id(found))
        waiting = None
        with contextlib.suppress(LimitError):  # then the fastest stays what it is
            waiting = self._waiting_for_collectives(found, best)
        if waiting is None:
            return fitting
        faster = self.overlapping.overlapped(waiting)
        self._before[id(faster)], self._known[id(found)] = waiting, (found, faster)
        return sorted([faster, *others], key=lambda ranked: ranked.seconds)

    def _waiting_for_collectives(self, found: Contender, overlapped: Ranked) -> Ranked | None:
        """The best plan of a contender's configuration in which tensor parallelism waits for its collectives, if that
        is faster than one with overlaps: sums of such layouts are exact, others hope for overlap."""
        least, configuration = overlapped.seconds, found.configuration
        hopes = self.request.pinned.tensor_overlap is None and self.engine.overlapped
        hopes = hopes and self.request.algorithm != "recursive_programming"  # which decides axis by axis, not of all
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
        """What makes plans in which tensor parallelism waits for its collectives."""
        return self._asking(self.engine.without_overlap)

    def _asking(self, engine: Engine) -> "Finalists":
        """What makes plans of what another engine finds, for its request."""
        return Finalists(maker=replace(self.maker, request=engine.request, engine=engine), found=())

    def _sum_for(self, found: Contender, cutoff: Seconds) -> Seconds:
        """What a plan of a contender takes by its sum that may take `cutoff` in some order of turns."""
        least = found.least_step(any_order=reorders(self.request.pinned))
        return cutoff * max(1.0, found.objective / least) if least > 0 else math.inf

    def _too_slow(self, ranked: Ranked, cutoff: Seconds) -> bool:
        """Whether a result that lacks memory for overlaps would take `cutoff` with all of them, whatever there is."""
        if cutoff == math.inf or not self.overlapping.possible or not self.overlapping.missing(ranked):
            return False
        return self.room.hoped(ranked) >= cutoff

    def _finished(self, found: Contender, ranked: Ranked, cutoff: Seconds) -> Ranked:
        """A plan of a contender in an order of turns that takes it least, with less memory if need be, and with room
        for its overlaps; as it is where nothing of that may take less than `cutoff`."""
        if reorders(self.request.pinned):
            with contextlib.suppress(LimitError):  # in the order that the search assumed, then
                ranked = self.sums.one_by_one(found, self.orders.reordered(ranked, cutoff), cutoff)
        if not self._may_win(ranked, cutoff):
            return ranked
        if self.overlapping.possible and self.maker.overfull_by(ranked) > 0 and self.overlapping.missing(ranked):
            roomy = self.room.with_room(found, ranked, cutoff)
            if not self.maker.storable(roomy):  # without overlaps it may fit, and win all the same
                return self.room.lean(found, ranked, cutoff) if ranked.seconds < cutoff else roomy
            seconds = self.overlapping.overlapped(roomy).seconds
            if seconds <= self.room.hoped(ranked) * (1 + WORTH):
                return roomy
            other = self.room.lean(found, ranked, min(cutoff, seconds))  # with less memory for fewer overlaps
            faster = self.maker.storable(other) and self.overlapping.overlapped(other).seconds < seconds
            return other if faster else roomy
        return self.room.lean(found, ranked, cutoff)

    @property
    def priced(self) -> tuple[Ranked, ...]:
        """Contenders that `plans` has priced, those that do not fit left out."""
        known = (ranked for _, ranked in self._known.values())
        return tuple(one for one in known if self.maker.storable(one))

    def plain(self, found: Contender) -> Ranked | None:
        """A contender as it was found, as a plan, in the order of turns that takes it least; None where it does not
        fit."""
        ranked = self.maker.settled(self.maker.as_found(found))
        pinned = self.request.pinned
        if asks(pinned) or (found.configuration.pipeline > 1 and reorders(pinned)):
            ranked = self.orders.scheduled(ranked, math.inf)
        return self.overlapping.overlapped(ranked) if self.maker.storable(ranked) else None

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
            configuration, best = ranked.configuration, self.orders.in_turns(ranked, overlapped.seconds)
            machine = self.engine.machine(configuration)
            if EACH in self.engine.gathers and turns_may_cover(ranked.bound, self.request.pinned, machine):
                outcome = self.engine.evaluate_as(EACH, configuration)
                if outcome.ranks:
                    one_by_one = self.engine.contender(configuration, outcome)
                    best = self._in_faster_turns(one_by_one, best, min(overlapped.seconds, best.seconds))
            turns = best.plan.training.interleave > 1 or best.plan.slices > 1
            return min(overlapped, best if turns else self.overlapping.overlapped(best), key=lambda one: one.seconds)
        return overlapped

    def _in_faster_turns(self, found: Contender, best: Ranked, cutoff: Seconds) -> Ranked:
        """A contender whose micro-batches take turns, or the best where that is as fast. What wins as it was found is
        settled."""
        as_found = self.maker.made(found, found.outcome.ranks)
        plain = Ranked(bound=as_found, configuration=found.configuration, memory_price=found.outcome.price, found=found)
        turned = self.orders.in_turns(plain, cutoff)
        if turned.seconds >= best.seconds * (1 - WORTH) or not self.maker.storable(turned):
            return best
        settled = self.orders.in_turns(self.maker.settled(self.maker.as_found(found)), cutoff)
        return settled if settled.seconds < turned.seconds and self.maker.storable(settled) else turned

    def _in_a_v(self, best: Ranked) -> Ranked:
        """The best, or a faster result with two stages on each rank, in a V, whose orders have next to no bubble:
        results are tried that are faster without theirs."""
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
        # with several stages on each rank, or one, the same is divided anew
        distinct = {_in_order(one[2], IN_A_V[0]): one for one in reversed(hopeful)}
        for (least, _, found), schedule in product(sorted(distinct.values())[:_TURNED], IN_A_V):
            best = self._laid(least, _in_order(found, schedule), best)
        for least, key in self._of_other_degrees(best):
            best = self._laid(least, key, best)
        return best

    def _of_other_degrees(self, best: Ranked) -> list[tuple[Seconds, Laying]]:
        """Pipelines of degrees that nothing was tried of, in an order whose passes run together, which exchange experts
        under each other: what is exposed in sums may be covered there, so that no sum says which degree is best."""
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
        """The best, or a faster result in a V, of this one or of earlier contenders; it is tried where `least` says
        that it may be faster."""
        if least < best.seconds * (1 - WORTH) and not reached() and not self._laid_alike(key[0]):
            with contextlib.suppress(LimitError):
                self._laid_in_a_v(key, best)
        known = (laid for laid in self._known_in_a_v.values() if laid is not None)
        laid = min(known, key=lambda ranked: ranked.seconds, default=best)
        return laid if laid.seconds < best.seconds * (1 - WORTH) else best

    def _laid_alike(self, configuration: Configuration) -> bool:
        """Whether a schedule has the same turns as one before it, as with few micro-batches, and none that run
        together."""
        p, m, schedule = configuration.pipeline, configuration.micro_batches, configuration.schedule
        if self.engine.has_experts and SCHEDULES[schedule].paired:
            return False
        turns = schedule_orders(schedule, p, m, virtual=2)
        return any(schedule_orders(one, p, m, virtual=2) == turns for one in IN_A_V[: IN_A_V.index(schedule)])

    def _laid_in_a_v(self, key: Laying, best: Ranked) -> None:
        """Note a configuration with its stages in a V; None where that is no faster than the best, or does not fit."""
        if key not in self._known_in_a_v:
            self._known_in_a_v[key] = self._divided_for_a_v(*key, best)

    def _divided_for_a_v(self, configuration: Configuration, gathers: str, best: Ranked) -> Ranked | None:
        own, p, m, cutoff = self._in_order_of_a_v, configuration.pipeline, configuration.micro_batches, best.seconds
        passes_run_together = SCHEDULES[configuration.schedule].paired and self.engine.has_experts
        covered = best.waited if passes_run_together else 0.0
        longer = (cutoff + covered) * (m + p - 1) / m  # sums have the bubble of 1F1B, and all exchanges exposed
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
        """What makes plans where such an order is asked for: nothing travels under its products, so that layouts are
        others."""
        return self._asking(self.engine.in_a_v)


def _in_order(found: Contender, schedule: str) -> Laying:
    """What a contender is divided anew by, in an order of stages in a V: its configuration in that, and its way to
    gather weights."""
    return replace(found.configuration, virtual_stages=1, schedule=schedule), found.outcome.gathers


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
        needed,
    )
