"""Configurations with several stages on each rank, whose number the user left open.

    one stage on each rank            found:  t seconds        proved:  b seconds
    v stages on each of p ranks       promise:  share t        at least:  share b        (`least_share`)

The share is what a shorter bubble may leave of the step. They are evaluated after the configurations with one stage on
each rank, the most promising first; stages of unequal numbers of blocks come after those of equal numbers, which they
have to beat.
"""

import math
from collections.abc import Callable

from planner.limits import check
from planner.strategy_search.engine.family import Family, least_share
from planner.strategy_search.exploration.early_plans import EarlyPlans
from planner.strategy_search.exploration.evaluator import Evaluator
from planner.strategy_search.exploration.frontier import Bounded
from planner.strategy_search.request.space import Configuration

_UNEVEN_TRIED = 3
"""Configurations with unequal numbers of blocks in their virtual stages are evaluated with the most promising first.
The search stops trying them when this many in a row were slower than the best plan known."""


class VirtualStages:
    """Evaluates the postponed configurations of the frontier."""

    def __init__(self, evaluator: Evaluator, early: EarlyPlans, cancelled: Callable[[], bool]) -> None:
        self.evaluator, self.early, self.cancelled = evaluator, early, cancelled
        self.found, self.bounds, self.record = evaluator.found, evaluator.bounds, evaluator.record
        self.frontier, self.families = evaluator.frontier, evaluator.families
        self._asked = set[tuple[Configuration, bool]]()  # with one stage; bounded with free memory, or at a price
        self._missed = 0  # unequal stages in a row that were slower

    def evaluate(self) -> bool:
        """Evaluate the postponed configurations. Returns whether the search was stopped before its end.

        Where the best contender is already a plan, its step bounds what may contend: interleaved stages run in one
        schedule only, other schedules need whole stages. Their step may overlap the transfers that objectives and
        bounds count as exposed.
        """
        postponed, step = self.frontier.postponed, math.inf
        postponed.sort(key=self._promise, reverse=True)
        self._asked, self._missed = set(), 0
        if postponed:
            self.early.make_best()
        if self.early.best is not None:
            step = self.early.best.bounded
        while postponed:
            if self.cancelled():
                return True
            check()
            if self.evaluator.takes(postponed[-1].configuration):
                self._try(postponed[-1], step)
            postponed.pop()
        return False

    def _promise(self, postponed: Bounded) -> tuple[object, ...]:
        """Sorts configurations, the most promising first: equal stages by their bounds; then unequal ones, first by
        what was found with one stage on each rank, then, where nothing was found, by their bounds, which count memory
        as free."""
        bound, c, _ = postponed
        alone, _ = self.record.with_one_stage(c) or (math.inf, 0.0)
        if not c.uneven or alone == math.inf:
            return c.uneven, c.uneven, bound, c.tie
        return True, False, alone * least_share(c), c.tie

    def _try(self, postponed: Bounded, step: float) -> None:
        """Evaluate a configuration if nothing proves that it is slower than the best plan, or if the time found with
        one stage on each rank, times the share that a shorter bubble may leave of it, is below the cutoff."""
        bound, c, family = postponed
        alone, proved = self.record.with_one_stage(c) or (math.inf, self.found.cutoff)
        share, cutoff = least_share(c), min(self.found.cutoff, step)
        if c.uneven and family is not None and step < self.found.cutoff:
            cutoff = min(self.found.cutoff, step + family.transfer_seconds(c))
        bound = max(bound, proved * share)
        given_up = c.uneven and self._missed == _UNEVEN_TRIED
        if bound < cutoff and family is not None and not given_up:
            bound = self._bound_of(c, family, bound, cutoff)
        if not given_up and (bound < min(self.found.best, cutoff) or (bound < cutoff and alone * share < cutoff)):
            self.evaluator.evaluate(c, family, bound, cutoff)
            slower = c.uneven and self.record.seconds.get(c, math.inf) >= cutoff
            self._missed = self._missed + 1 if slower else 0
            return
        self.bounds.note(c, bound)
        self.frontier.cut_off.append(Bounded(bound, c, family))

    def _bound_of(self, c: Configuration, family: Family, bound: float, cutoff: float) -> float:
        """A lower bound on a configuration with virtual stages, also from its configuration with one stage on each rank
        where that was not evaluated."""
        plain, (alone, _) = self.families.with_one_stage(c), self.record.with_one_stage(c) or (math.inf, 0.0)
        hint = self.evaluator.hint_for(family)
        for free in (True, False):  # the bound holds for all numbers of virtual stages
            if bound < cutoff and math.isinf(alone):
                if (plain, free) not in self._asked:
                    self._asked.add((plain, free))
                    family.priced_seconds(plain, hint, cutoff / least_share(c), free=free)
                bound = max(bound, family.seconds_with_one_stage(c, cutoff))
        return max(bound, family.priced_seconds(c, hint, cutoff))
