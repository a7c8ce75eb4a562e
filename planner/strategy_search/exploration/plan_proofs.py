"""Which lower bound holds for a plan.

The bound of the search is about plans with their stages one after the other and whole sequences:

    stages in a V          the busiest rank runs its passes one after the other; a micro-batch passes all stages
    slices of sequences    the work alone, if hosts launch ahead
    other plans            the bound of the search
"""

import math
from collections.abc import Sequence
from functools import cached_property

from planner.limits import seconds_left
from planner.strategy_search.engine.exchange_overlap import may_exchange_under_work
from planner.strategy_search.engine.families import family_of
from planner.strategy_search.exploration.families import Families
from planner.strategy_search.finalists.proofs import Ranked, with_proof
from planner.strategy_search.request.space import Configuration

_IN_A_V = 64
"""Maximum number of pipeline families for which the search bounds how long the busiest rank is busy with its stages in
a V. With more families it uses the bound by work alone."""


class PlanProofs:
    """The lower bounds that hold for plans of the listed families."""

    def __init__(self, families: Families) -> None:
        self.families, self.engine, self.request = families, families.engine, families.request

    def with_bounds(self, plans: Sequence[Ranked], bound: float) -> tuple[Ranked, ...]:
        """The plans with their bounds, where the search has proved `bound`."""
        return tuple(
            with_proof(one, self.bound_of(one, bound), covered=self.covers(one.configuration)) for one in plans
        )

    def covers(self, configuration: Configuration) -> bool:
        """Whether the bound covers plans of this configuration. It covers neither meshes of three and four axes nor
        unequal virtual stages, unless the request asks for them."""
        usual = len(configuration.mesh) <= 2 or any(c.mesh == configuration.mesh for c in self.families.space)
        return usual and not self.families.is_apart(configuration)

    def bound_of(self, ranked: Ranked, bound: float) -> float:
        """The lower bound that holds for a plan. The search's bound holds for stages laid one after the other; for
        stages in a V there is a bound on how long ranks are busy. Slices of a sequence may save more of what a host
        launches ahead than the bound counts, so plans with slices are bounded by the work alone."""
        if ranked.plan.slices > 1 and any(stage.ahead_seconds for stage in ranked.plan.prediction.stages):
            return min(bound, self.engine.least_work)
        if not ranked.plan.schedule_kind.v_shaped:
            return bound
        return self.in_a_v if self.request.pinned.in_a_v else min(bound, self.in_a_v)

    @cached_property
    def in_a_v(self) -> float:
        """A lower bound on the step time of plans with their stages in a V.

        The slowest rank runs its passes one after the other, so the step takes as long as this rank is busy; and every
        micro-batch passes all stages. Where passes of two micro-batches run together, they may overlap the exchanges of
        experts and nothing else. With too many families the bound is that by the work alone.
        """
        least, pipelines = self.engine.least_work, [one for one in self.families.all if one[0].pipeline > 1]
        if not 0 < len(pipelines) <= _IN_A_V or self.request.alternatives or seconds_left() < math.inf:
            return least
        paired = self.engine.has_experts and may_exchange_under_work(self.request.pinned, self.request.cluster)
        engine, found = self.engine.in_pairs if paired else self.engine, math.inf
        for members in pipelines:
            plain = tuple(c for c in members if c.virtual_stages == 1)
            family = family_of(engine, plain) if plain else None
            if family is None:
                return least
            found = min(found, *(max(family.busy_in_a_v(c), self.engine.seconds_of_one(c)) for c in plain))
        return max(least, found)
