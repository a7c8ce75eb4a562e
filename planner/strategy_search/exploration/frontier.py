"""The frontier of the search: configurations that are not evaluated, each with a lower bound on its step time.

queue       families and configurations, the lowest bound first
postponed   with virtual stages: they wait until the configurations with one stage on each rank are done
cut off     their bounds reached the cutoff of that time
"""

import heapq
import math
from typing import NamedTuple

from planner.strategy_search.engine.evaluation import NO_HINT, Hint
from planner.strategy_search.engine.family import Family
from planner.strategy_search.exploration.families import Families
from planner.strategy_search.request.space import Configuration

_NOT_ASKED: Hint = (-1.0, (-1.0, -1.0, -1.0))


class Entry(NamedTuple):
    """An entry of the queue: a family that is not opened yet, or one configuration. `tie` orders entries of equal
    bound, `hint` is the price of memory that its bound was asked for last."""

    bound: float
    tie: tuple[object, ...]
    family: Family | None
    members: tuple[Configuration, ...]
    hint: Hint

    @property
    def is_closed(self) -> bool:
        """Whether it is a family that is not opened yet."""
        return self.family is None and len(self.members) > 1


class Bounded(NamedTuple):
    """A configuration that is not evaluated, its lower bound, and its family, if that was opened."""

    bound: float
    configuration: Configuration
    family: Family | None


class Frontier:
    """The families and configurations that are not evaluated."""

    def __init__(self, families: Families) -> None:
        self.families = families
        self.queue: list[Entry] = []
        self.postponed: list[Bounded] = []
        self.cut_off: list[Bounded] = []

    @property
    def least(self) -> float:
        """The lowest bound in the queue; infinite if it is empty."""
        return self.queue[0].bound if self.queue else math.inf

    def push(
        self, bound: float, members: tuple[Configuration, ...], family: Family | None = None, hint: Hint = NO_HINT
    ) -> None:
        """Put a family that is not opened, or a configuration, into the queue."""
        heapq.heappush(self.queue, Entry(bound, members[0].tie, family, members, hint))

    def pop(self) -> Entry:
        """Take the entry with the lowest bound out of the queue."""
        return heapq.heappop(self.queue)

    def add_families(self) -> None:
        """Put all families into the queue, none of them opened."""
        for members in self.families.all:
            self.push(self.families.bound_of_all(members), members)

    def open_family(self, members: tuple[Configuration, ...], floor: float, cutoff: float) -> None:
        """Put the members of a family into the queue, each with the bound that the largest micro-batch proves. `floor`
        is the bound of the family's usual members."""
        family, bounds = self.families.bounds_of_each(members, floor, cutoff)
        for configuration, bound in zip(members, bounds, strict=True):
            self.push(bound, (configuration,), family, _NOT_ASKED)

    def put_back(self) -> None:
        """Put the configurations that were cut off back into the queue."""
        for bound, configuration, family in self.cut_off:
            self.push(bound, (configuration,), family, _NOT_ASKED)
        self.cut_off.clear()

    def in_order(self) -> list[Entry]:
        """The queue, the lowest bound first."""
        return sorted(self.queue, key=lambda one: one[:2])

    def not_evaluated(self) -> list[Bounded]:
        """Configurations in the queue, and those that were cut off."""
        return [*(Bounded(one.bound, c, one.family) for one in self.queue for c in one.members), *self.cut_off]
