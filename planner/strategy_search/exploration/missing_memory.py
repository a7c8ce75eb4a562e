"""How much memory is missing where nothing fits."""

import contextlib
import math

from planner.strategy_search.engine.engine import Engine
from planner.strategy_search.engine.outcome import Outcome
from planner.strategy_search.exploration.frontier import Frontier
from planner.strategy_search.request.constraints import NothingAgreesError
from planner.strategy_search.request.space import Configuration

_LOOKED_AT = 4
"""Number of configurations that are evaluated when nothing fits, to say how much memory is missing: those whose bounds
on memory are lowest."""


class MissingMemory:
    """What the leanest plan that was evaluated needs, if no plan fits.

    Attributes:
        needed: bytes that would be enough; infinite before any is known.
        fullest: the rank that needs them, and the number of ranks.
        group: the group of devices of that rank.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.needed = self._missing = math.inf
        self.fullest = (0, 1)
        self.group = engine.groups[0]

    def note(self, configuration: Configuration, outcome: Outcome) -> None:
        """For a configuration in which nothing fits, note how much memory would be enough, and on which rank."""
        group = self.engine.group_of(configuration, outcome.fullest)
        missing = outcome.least - self.engine.capacities[group]
        if missing < self._missing:
            self._missing, self.needed = missing, outcome.least
            self.fullest, self.group = (outcome.fullest, configuration.pipeline), self.engine.groups[group]

    def measure(self, frontier: Frontier) -> None:
        """Where bounds rule out everything, evaluate a few configurations to measure how much memory is missing."""
        regions = frontier.families.regions
        if regions is not None and all(entry.family is None for entry in frontier.queue):
            closed = sorted(frontier.queue, key=lambda one: (regions.least_bytes(one.members[0]), one.tie))
            for entry in closed[:_LOOKED_AT]:
                frontier.open_family(entry.members, entry.bound, math.inf)
        known = [
            (entry.family.least_bytes(entry.members[0]), entry.tie, entry.members[0])
            for entry in frontier.queue
            if entry.family is not None
        ]
        for _, _, configuration in sorted(known)[:_LOOKED_AT]:
            with contextlib.suppress(NothingAgreesError):
                self.note(configuration, self.engine.evaluate(configuration))
