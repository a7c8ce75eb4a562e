"""The lower bounds that the search has proved: for single configurations, and over all plans.

Evaluated configurations count with their own bounds, the others with those of the frontier:

    bound  =  min(evaluated, queue, postponed, best objective found)

Unequal virtual stages are tried without proof, so they do not count. Stages in a V are bounded by the work alone
(`planner.strategy_search.exploration.plan_proofs`).
"""

import math
from collections.abc import Iterator

from planner.strategy_search.exploration.found import Found
from planner.strategy_search.exploration.frontier import Frontier
from planner.strategy_search.request.space import Configuration


class LowerBounds:
    """The lower bounds of one attempt.

    Attributes:
        of_evaluated: by configuration.
        with_more_memory: the bound of earlier attempts; one that is proved with less memory does not hold.
        lowest: over the configurations that left the frontier.
    """

    def __init__(self, frontier: Frontier, found: Found, with_more_memory: float) -> None:
        self.frontier, self.families, self.found = frontier, frontier.families, found
        self.engine, self.in_a_v = found.engine, found.request.pinned.in_a_v
        self.with_more_memory = with_more_memory
        self.lowest = math.inf
        self.of_evaluated = dict[Configuration, float]()

    def cover(self, bound: float) -> None:
        """Count a bound of configurations that leave the frontier."""
        self.lowest = min(self.lowest, bound)

    def note(self, configuration: Configuration, bound: float) -> None:
        """Count the bound of a configuration that leaves the frontier."""
        if not self.families.is_apart(configuration):
            self.cover(bound)

    def so_far(self) -> float:
        """The bound proved so far. It holds for stages laid one after the other. For stages in a V only the work is
        bounded; the end of the search improves on it."""
        best = self.found.best
        if self.in_a_v:
            return min(self.engine.least_work, best)
        return min(self.lowest, self.frontier.least, best, *(one.bound for one in self.frontier.postponed))

    def at_the_end(self) -> float:
        """The bound at the end."""
        if self.in_a_v:
            return min(self.so_far(), self.with_more_memory)
        waiting = (bound for bound, c in self._waiting() if not self.families.is_apart(c))
        return min(self.lowest, self.with_more_memory, self.found.best, *waiting)

    def of_each(self) -> dict[Configuration, float]:
        """The bound of every configuration; empty if the search had less memory than the request asks for."""
        if self.with_more_memory < math.inf:
            return {}
        return {**{c: bound for bound, c in self._waiting()}, **self._of_considered()}

    def of_degrees(self) -> list[tuple[float, Configuration]]:
        """For each pipeline degree, the configuration with the lowest bound and that bound without the bubble of 1F1B;
        the lowest first. The bounds are those by prices of memory. Configurations have one stage on each rank and at
        least as many micro-batches as a schedule in a V needs to fill its ranks (2p)."""
        best: dict[int, tuple[float, tuple[object, ...], Configuration]] = {}
        for c, bound in self._of_considered().items():
            if 1 < c.pipeline <= c.micro_batches // 2 and c.virtual_stages == 1 and bound < math.inf:
                one = (bound, c.tie, c)
                best[c.pipeline] = min(best.get(c.pipeline, one), one, key=lambda known: known[:2])
        filled = [(b * c.micro_batches / (c.micro_batches + c.pipeline - 1), c) for b, _, c in best.values()]
        return sorted(filled, key=lambda one: one[0])

    def _of_considered(self) -> dict[Configuration, float]:
        """The bounds of configurations that were evaluated or cut off."""
        return {**{one.configuration: one.bound for one in self.frontier.cut_off}, **self.of_evaluated}

    def _waiting(self) -> Iterator[tuple[float, Configuration]]:
        """The bounds of configurations that are still waiting."""
        families = self.families
        for entry in self.frontier.queue:
            for c in entry.members:
                yield families.bound_in_family(c, entry.bound) if entry.is_closed else entry.bound, c
        yield from ((one.bound, one.configuration) for one in self.frontier.postponed)
