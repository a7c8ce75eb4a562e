"""The best plans found so far, and from how many seconds on other plans are of no interest."""

import math

from hardware_profiles import Hidden
from planner.sharding.update import AHEAD
from planner.strategy_search.engine.contenders import NEAR, Contender, Contenders
from planner.strategy_search.engine.engine import Engine
from planner.strategy_search.engine.outcome import Outcome
from planner.strategy_search.finalists.proofs import Ranked
from planner.strategy_search.request.space import Configuration


class Found:
    """The contenders, the conventional plan that the search began with, and a plan that was `known` before it. Plans
    with an objective of `limit` seconds or more are of no interest."""

    def __init__(self, engine: Engine, limit: float, known: Ranked | None) -> None:
        self.engine, self.request, self.limit, self.known = engine, engine.request, limit, known
        hides = self.request.cluster.software.hidden != Hidden() or AHEAD in engine.gathers
        decided = self.request.pinned.pipeline == 1 and not hides and not engine.overlapped and self.request.prune
        self.contenders = Contenders(self.request.top, decided=decided, every=not self.request.prune)
        self.incumbent: Contender | None = None
        self._of_outcomes: dict[int, tuple[Outcome, Contender]] = {}  # by id

    @property
    def cutoff(self) -> float:
        """Plans that take this long or longer are of no interest."""
        if not self.request.prune:
            return self.limit
        if self.request.tolerance:
            return min(self.limit, self.best * (1 - self.request.tolerance))
        first = math.inf
        if self.incumbent and self.request.top == 1 and not self.contenders.step:
            first = self.incumbent.objective * (1 + NEAR)
        if self.known is not None and not self.contenders.step:
            first = min(first, self.known.bounded * (1 + NEAR))
        return min(self.limit, self.contenders.cutoff, first)

    @property
    def best(self) -> float:
        """The lowest objective found so far; a plan that was known before the search counts too."""
        known = math.inf if self.known is None else self.known.bounded
        return min(self.contenders.best, self.incumbent.objective if self.incumbent else math.inf, known)

    def add(self, configuration: Configuration, outcome: Outcome) -> None:
        """Let a configuration contend if its objective is below the cutoff. Otherwise it is left: it contends if the
        best plans take longer than their objectives."""
        if outcome.seconds < self.cutoff:
            self.contenders.add(self.contender(configuration, outcome))
        else:
            self.contenders.left[configuration] = outcome

    def contender(self, configuration: Configuration, outcome: Outcome) -> Contender:
        """The contender of an outcome. Every caller gets the same object, so each is priced once."""
        if id(outcome) not in self._of_outcomes:
            self._of_outcomes[id(outcome)] = (outcome, self.engine.contender(configuration, outcome))
        return self._of_outcomes[id(outcome)][1]

    def take_incumbent(self) -> None:
        """Let the incumbent contend if nothing better was found."""
        if self.incumbent is not None and self.incumbent.objective < self.contenders.best:
            self.contenders.add(self.incumbent)
