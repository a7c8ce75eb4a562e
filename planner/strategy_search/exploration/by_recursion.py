"""Recursive programming over numbers of ranks and micro-batches, in place of the best-first search over families."""

import math
from collections import Counter
from collections.abc import Callable

from planner.limits import check
from planner.strategy_search.engine.family import least_share
from planner.strategy_search.exploration.evaluator import Evaluator
from planner.strategy_search.finalists.finalists import Finalists
from planner.strategy_search.finalists.proofs import Ranked
from planner.strategy_search.request.constraints import NothingAgreesError
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration

_SWEPT = 3
"""Number of configurations that are decided once more, with sweeps."""

_SLOWER = 2
"""After this many numbers of pipeline ranks in a row that are slower than the best, no more are tried."""


class ByRecursion:
    """Explores the configurations of a request axis by axis (`planner.strategy_search.engine.recursive`)."""

    def __init__(self, evaluator: Evaluator, cancelled: Callable[[], bool]) -> None:
        self.evaluator, self.cancelled = evaluator, cancelled
        self.engine, self.request = evaluator.engine, evaluator.engine.request
        self.found, self.bounds = evaluator.found, evaluator.bounds
        self.frontier, self.families = evaluator.frontier, evaluator.families

    def explore(self) -> bool:
        """Search axis by axis for numbers of ranks and micro-batches.

        For a number of ranks the micro-batches are tried outwards from one sample on every device, as long as that
        helps. More ranks are tried until `_SLOWER` numbers of them in a row were slower. Virtual stages are tried where
        a shorter bubble may make a configuration with one stage on each rank the fastest. This is a heuristic, like the
        search of an axis itself. The best are then decided once more with sweeps. Returns whether the search was
        stopped before its end.
        """
        found: dict[Configuration, float] = {}
        slower: Counter[object] = Counter()  # by the purposes of axes
        alone: dict[tuple[object, int], float] = {}
        waiting = list[Configuration]()
        for members in self._lines():
            if all(map(self.families.waits_for_plain, members)):
                waiting += members
                continue
            if slower[members[0].roles] >= _SLOWER:
                continue
            middle = min(range(len(members)), key=lambda at: abs(math.log(_samples(self.request, members[at]))))
            best, fastest = math.inf, self.found.best
            for steps in (range(middle, len(members)), range(middle - 1, -1, -1)):
                for c in (members[at] for at in steps):
                    if self._goes_no_further() or self.engine.bound(c) >= self.found.cutoff:
                        break
                    found[c] = alone[c.family, c.micro_batches] = seconds = self._descend(c, sweeps=0)
                    if best < seconds:
                        break
                    best = seconds
            if best < math.inf:
                slower[members[0].roles] = 0 if self.found.best < fastest else slower[members[0].roles] + 1
        promise = {c: alone.get((c.family, c.micro_batches), math.inf) * least_share(c) for c in waiting}
        for c in sorted(waiting, key=lambda one: (promise[one], one.tie)):
            if self._goes_no_further() or promise[c] >= self.found.best < math.inf:
                break
            found[c] = self._descend(c, sweeps=0)
        for c in sorted(found, key=lambda one: (found[one], one.tie))[:_SWEPT]:
            if not self._goes_no_further():
                self._descend(c, sweeps=3)
        return self._goes_no_further()

    def search_on(self, finalists: Finalists, plans: tuple[Ranked, ...]) -> tuple[Ranked, ...]:
        """The same plans: this search is a heuristic, which looked at what it would look at."""
        return plans

    def _goes_no_further(self) -> bool:
        """Whether the user has stopped the search. Raises LimitError at a limit of the planner."""
        check()
        return self.cancelled()

    def _lines(self) -> list[tuple[Configuration, ...]]:
        """Configurations that differ only in their micro-batches; without a given mesh one stands for all meshes."""
        self.frontier.queue.clear()
        self.bounds.cover(min(map(self.engine.bound, self.families.space)))  # of all, as not every one is looked at
        given = self.request.pinned.mesh is not None or bool(self.request.shards)
        lines: dict[object, list[Configuration]] = {}
        for c in self.families.space:
            if given or c.roles or len(c.mesh) < 2:
                lines.setdefault((c.family, c.virtual_stages), []).append(c)
        self.families.total = sum(map(len, lines.values()))
        every = sorted(lines.values(), key=lambda line: line[0].pipeline)
        return [tuple(sorted(line, key=lambda c: c.micro_batches)) for line in every]

    def _descend(self, configuration: Configuration, *, sweeps: int) -> float:
        """Evaluate the plan that recursive programming finds for a configuration. Returns its seconds."""
        try:
            found = self.engine.recursive(configuration, sweeps=sweeps)
            if found is None:
                self.evaluator.record.evaluated.add(configuration)
                return math.inf
            adopted = self.engine.adopt(configuration, found)
            outcome = self.engine.evaluate(adopted, cutoff=self.found.cutoff)
        except NothingAgreesError as error:
            self.evaluator.disagreement = self.evaluator.disagreement or error
            return math.inf
        self.evaluator.take(adopted, outcome, self.engine.bound(configuration))
        return found.seconds


def _samples(request: SearchRequest, configuration: Configuration) -> float:
    """Samples of a micro-batch on every device of a rank."""
    devices = request.cluster.devices / configuration.pipeline
    return request.padded_batch / configuration.micro_batches / devices
