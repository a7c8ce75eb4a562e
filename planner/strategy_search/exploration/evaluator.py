"""Evaluates configurations one by one, and notes what each of them gives."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace

from planner.strategy_search.engine.engine import Engine
from planner.strategy_search.engine.evaluation import NO_HINT, Hint
from planner.strategy_search.engine.family import Family
from planner.strategy_search.engine.outcome import Outcome
from planner.strategy_search.engine.outcome_words import configuration_words, fate_words
from planner.strategy_search.exploration.found import Found
from planner.strategy_search.exploration.frontier import Bounded, Frontier
from planner.strategy_search.exploration.lower_bounds import LowerBounds
from planner.strategy_search.exploration.record import Record
from planner.strategy_search.exploration.reporter import Reporter
from planner.strategy_search.request.constraints import NothingAgreesError
from planner.strategy_search.request.space import Configuration

_LOG = logging.getLogger(__name__)
"""Reports the result of every configuration, at level INFO."""

_UNEVEN = 1e-3
"""Share of the objective that virtual stages of unequal numbers of blocks must save where equal ones are possible."""


class Evaluator:
    """Evaluates configurations. Those that it `takes` may contend; the others are evaluated for comparison only.

    Attributes:
        disagreement: why the first configuration was left out whose decisions contradict each other.
    """

    def __init__(
        self,
        engine: Engine,
        frontier: Frontier,
        found: Found,
        bounds: LowerBounds,
        record: Record,
        report: Reporter,
        takes: Callable[[Configuration], bool],
    ) -> None:
        self.engine, self.frontier, self.families = engine, frontier, frontier.families
        self.found, self.bounds, self.record = found, bounds, record
        self.report, self.takes = report, takes
        self.disagreement: NothingAgreesError | None = None
        self._hint = NO_HINT
        self._overfull = dict[Configuration, Outcome]()  # conventional, do not fit

    def hint_for(self, family: Family | None) -> Hint:
        """The price and shares that mattered to a member of the family, or else to the configuration evaluated last."""
        return family.hint if family is not None and family.hint != NO_HINT else self._hint

    def try_first(self, configuration: Configuration) -> bool:
        """Evaluate a conventional configuration. Returns whether it is the best so far."""
        found = self.found
        cutoff = min(found.limit, found.best)
        if not self.takes(configuration) or self.families.bound_before(configuration) >= cutoff:
            return False
        try:
            outcome = self.engine.evaluate(configuration, cutoff=cutoff)
        except NothingAgreesError:
            return False
        self.record.solved += outcome.solved
        if outcome.bound == math.inf or (outcome.overfull and cutoff == math.inf):
            self._overfull[configuration] = replace(outcome, solved=0)
        if not outcome.ranks or outcome.seconds >= cutoff:
            return False
        found.incumbent = self.engine.contender(configuration, outcome)
        self._hint = (outcome.price, outcome.under)
        return True

    def evaluate(
        self, configuration: Configuration, family: Family | None, bound: float, cutoff: float = math.inf
    ) -> None:
        """Evaluate a configuration of the frontier. `bound`: what is known to bound its step time."""
        hint, cutoff = self.hint_for(family), min(cutoff, self.found.cutoff)
        try:
            proved = {} if family is None else family.proved(configuration)
            outcome = self._overfull.get(configuration) or self.engine.evaluate(
                configuration, cutoff=cutoff, hint=hint, proved=proved
            )
        except NothingAgreesError as error:
            self.disagreement = self.disagreement or error
            _LOG.info("%s: left out, %s", configuration_words(configuration), error)
            return
        if outcome.price or any(outcome.under):
            self._hint = (outcome.price, outcome.under)
            if family is not None:
                family.hint = self._hint
        own = 0.0 if self.engine.spreads else outcome.bound  # it bounds the propagated strategies, not all
        bound = max(bound, own)
        if not outcome.ranks and outcome.bound < math.inf:
            self.frontier.cut_off.append(Bounded(bound, configuration, family))
        self.bounds.of_evaluated[configuration] = bound
        self.take(configuration, outcome, bound)

    def take(self, configuration: Configuration, outcome: Outcome, bound: float) -> None:
        """Note an outcome. `bound`: no plan of this configuration is faster."""
        self.record.note(configuration, outcome, bound)
        _LOG.info("%s: %s", configuration_words(configuration), fate_words(outcome, self.found.cutoff))
        self.bounds.note(configuration, bound)
        if outcome.ranks and self.takes(configuration) and self._is_worth_it(configuration, outcome):
            self.found.add(configuration, outcome)
        self.report()

    def _is_worth_it(self, configuration: Configuration, outcome: Outcome) -> bool:
        """Whether virtual stages of unequal numbers of blocks save enough, if these are unequal."""
        if not configuration.uneven:
            return True
        equal = self.record.seconds.get(replace(configuration, uneven=False), math.inf)
        return outcome.seconds < equal * (1 - _UNEVEN)
