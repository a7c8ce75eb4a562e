"""Schedules of finalists: which may make a plan faster, and how long it takes in the fastest."""

import math
from dataclasses import dataclass, replace

from hardware_profiles import Seconds
from planner.plan.binding.bind import BoundPlan
from planner.plan.prediction.step import PIPELINE_BUBBLE
from planner.plan.prediction.walk.stage_cost import TRANSFER
from planner.strategy_search.engine.exchange_overlap import in_parts
from planner.strategy_search.engine.scheduling import (
    WORTH,
    all_fit,
    as_asked,
    asks,
    fastest_of,
    fastest_schedule,
    in_orders,
    reorders,
    with_turns,
)
from planner.strategy_search.finalists.overlapping import Overlapping
from planner.strategy_search.finalists.plan_maker import PlanMaker
from planner.strategy_search.finalists.proofs import Ranked

_HELD = 0.5
"""Share of a rank's activations that a schedule with more micro-batches in flight needs on top, at least; the rest may
belong to one block."""


@dataclass(kw_only=True)
class Orders:
    """Schedules of the plans of a `maker`."""

    maker: PlanMaker
    overlapping: Overlapping

    def __post_init__(self) -> None:
        self.request, self.engine = self.maker.request, self.maker.engine
        self._others: dict[int, tuple[Ranked, list[BoundPlan]]] = {}  # by id

    def in_other_orders(self, ranked: Ranked) -> Seconds:
        """A lower bound on the step time of a 1F1B plan in other schedules: with deferred weight gradients, without a
        bubble and without its overlaps; or in a schedule that holds more micro-batches, for which there may be no
        memory, with transfers between stages overlapped. Infinite if there are no other schedules."""
        plan, pipeline = ranked.plan, ranked.plan.pipeline
        if pipeline == 1 or plan.schedule != "1f1b" or not reorders(self.request.pinned):
            return math.inf
        time, memory = dict(plan.prediction.time), dict(plan.prediction.memory)
        bubble, apart = time[PIPELINE_BUBBLE], ranked.seconds - time[PIPELINE_BUBBLE]
        holds = _HELD * memory["activations"] * (pipeline - 1) / pipeline
        if holds > -self.maker.overfull_by(ranked):
            return apart
        return min(apart, self.overlapping.expected(ranked).seconds - min(bubble, time[TRANSFER]))

    def in_any(self, ranked: Ranked) -> Seconds:
        """The step time of a plan in its fastest schedule if memory were unlimited. Unlike `in_other_orders` it
        includes the bubbles that schedules leave."""
        if self.in_other_orders(ranked) == math.inf:
            return ranked.seconds
        if id(ranked) not in self._others:
            machine = self.engine.machine(ranked.configuration)
            self._others[id(ranked)] = (ranked, in_orders(ranked.bound, machine))
        _, others = self._others[id(ranked)]
        return min([ranked.seconds, *(one.plan.prediction.step_seconds for one in others)])

    def reordered(self, ranked: Ranked, cutoff: Seconds) -> Ranked:
        """A plan in its fastest schedule, if another schedule, with the overlaps that remain in it, may take less than
        `cutoff` and less than the plan does now."""
        if not self.overlapping.possible or asks(self.request.pinned):
            return self.scheduled(ranked, math.inf if self.overlapping.possible else cutoff)
        others = self.in_other_orders(ranked)
        if others == math.inf or others >= min(cutoff, self.overlapping.expected(ranked).seconds * (1 - WORTH)):
            return ranked
        return self.scheduled(ranked, math.inf)

    def in_turns(self, ranked: Ranked, cutoff: Seconds) -> Ranked:
        machine, limits = self.engine.machine(ranked.configuration), self.maker.limits_of(ranked.configuration)
        waits = in_parts(ranked.bound, self.request.pinned, machine)
        bound = with_turns(waits, self.request.pinned, machine, limits, cutoff)
        if bound is waits:
            return ranked
        return replace(ranked, bound=bound, configuration=replace(ranked.configuration, schedule=bound.plan.schedule))

    def scheduled(self, ranked: Ranked, cutoff: float) -> Ranked:
        """A plan in its fastest schedule; unchanged if no schedule can be faster."""
        limits, machine = self.maker.limits_of(ranked.configuration), self.engine.machine(ranked.configuration)
        if asks(self.request.pinned):
            bound = as_asked(ranked.bound, self.request, machine, limits)
        elif id(ranked) in self._others:
            _, others = self._others[id(ranked)]
            fitting = [one for one in others if all_fit(one.plan.prediction, limits, machine)]
            bound = fastest_of(ranked.bound, fitting)
        else:
            bound = fastest_schedule(ranked.bound, machine, limits, cutoff)
        if bound is ranked.bound:
            return ranked  # `ranked` holds more than its bound plan
        configuration = replace(ranked.configuration, schedule=bound.plan.schedule)
        return replace(ranked, bound=bound, configuration=configuration)
