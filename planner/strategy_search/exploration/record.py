"""What the evaluated configurations gave."""

import math

from planner.strategy_search.engine.contexts import ContextNotes
from planner.strategy_search.engine.engine import Engine
from planner.strategy_search.engine.outcome import Outcome
from planner.strategy_search.exploration.missing_memory import MissingMemory
from planner.strategy_search.request.space import Configuration


class Record:
    """The results of evaluated configurations.

    Attributes:
        evaluated: the configurations.
        solved: how many problems were solved for them.
        seconds: found with several stages on each rank; infinite if nothing was found.
        contexts: results by way to split the sequence.
        missing: the memory that is missing, if nothing fits.
    """

    def __init__(self, engine: Engine) -> None:
        self.evaluated = set[Configuration]()
        self.solved = 0
        self.seconds = dict[Configuration, float]()
        self.contexts = ContextNotes(free=engine.request.pinned.free)
        self.missing = MissingMemory(engine)
        self._alone: dict[tuple[object, int], tuple[float, float]] = {}  # one stage on each rank: seconds, bound
        self._roomy = set[tuple[object, int]]()  # keys of `_alone` where memory does not bind

    def note(self, configuration: Configuration, outcome: Outcome, bound: float) -> None:
        """Note an outcome. `bound`: no plan of this configuration is faster."""
        c, found = configuration, outcome.seconds if outcome.ranks else math.inf
        self.evaluated.add(c)
        self.solved += outcome.solved
        self.missing.note(c, outcome)
        if c.virtual_stages == 1:
            self._alone[c.family, c.micro_batches] = (found, bound)
            if outcome.ranks and not outcome.price:
                self._roomy.add((c.family, c.micro_batches))
        else:
            self.seconds[c] = found
        self.contexts.note(c, bound=max(bound, outcome.bound), seconds=found, least=outcome.least)

    def with_one_stage(self, configuration: Configuration) -> tuple[float, float] | None:
        """The seconds found for the same configuration with one stage on each rank, infinite if nothing was found, and
        its bound; None if it was not evaluated."""
        return self._alone.get((configuration.family, configuration.micro_batches))

    def is_roomy(self, configuration: Configuration) -> bool:
        """Whether memory did not bind the same configuration with one stage on each rank."""
        return (configuration.family, configuration.micro_batches) in self._roomy
