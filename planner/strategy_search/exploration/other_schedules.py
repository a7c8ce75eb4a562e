"""Pipelines that the objective rules out, and that may win in a schedule which the objective does not assume.

The objective assumes 1F1B with exposed transfers between stages:

    deferred weight gradients (zero bubble)    fill a part of the bubble, which the objective counts in full
    several stages on each rank                overlap their transfers, which the objective counts as exposed

So when the plans of the contenders are known, the few pipelines that promise less than the slowest of these plans are
evaluated, and priced in the other schedules too. The promises are estimates. They decide what is tried, and prove
nothing.
"""

import contextlib
import heapq
import math
from collections.abc import Callable

from planner.strategy_search.engine.contenders import Contender, apart_seconds, in_1f1b
from planner.strategy_search.engine.family import least_share
from planner.strategy_search.engine.scheduling import WORTH, asks, reorders
from planner.strategy_search.exploration.evaluator import Evaluator
from planner.strategy_search.request.checks import runs_here
from planner.strategy_search.request.constraints import NothingAgreesError

_REORDERED = 2
"""Maximum number of pipelines that do not contend by their objectives and are priced in other schedules all the same;
the same limit holds for pipelines with virtual stages."""

_FOR_OTHER_ORDERS = 6
"""Maximum number of pipelines that are evaluated for other schedules than 1F1B. With few micro-batches, uneven stages
and the work that a rank does once per step weigh much, and lower bounds say little about either."""

_MISSES = 3
"""Evaluations stop when so many in a row found nothing that comes near the plans that are known."""

_NEAR = 0.02
"""Share by which a pipeline may promise more than the plans that are known and still be near: then others like it may
promise less."""


class OtherSchedules:
    """Looks for pipelines that another schedule may make faster than the plans found."""

    def __init__(self, evaluator: Evaluator, cancelled: Callable[[], bool]) -> None:
        self.evaluator, self.cancelled = evaluator, cancelled
        self.engine, self.request = evaluator.engine, evaluator.engine.request
        self.found, self.record, self.frontier = evaluator.found, evaluator.record, evaluator.frontier

    def with_deferred_gradients(self, slowest: float, gradients: float, *, piped: bool) -> list[Contender]:
        """The most promising pipelines that do not contend by their objectives, but may take less than `slowest` in a
        schedule with deferred weight gradients. `gradients`: the most seconds of a step in which a rank computes weight
        gradients. `piped`: a plan that was found is a pipeline."""
        pinned = self.request.pinned
        if not reorders(pinned) or asks(pinned) or not runs_here(self.request.cluster):
            return []
        self._evaluate_for_deferred_gradients(slowest, gradients, piped=piped)
        promises = [(one.promise(gradients), one) for one in self._left(several=False)]
        return _most_promising(promises, slowest * (1 - WORTH))

    def with_virtual_stages(self, slowest: float) -> list[Contender]:
        """The most promising pipelines with several stages on each rank that do not contend by their objectives. The
        objective counts all their transfers between stages as exposed; with overlapped transfers they may take less
        than `slowest`."""
        self._evaluate_for_overlapped_transfers(slowest)
        promises = [(one.sum_with(one.outcome.ranks), one) for one in self._left(several=True)]
        return _most_promising(promises, slowest)

    def _left(self, *, several: bool) -> list[Contender]:
        """Pipelines, with one or `several` stages on each rank, for which a plan was found, and which do not contend by
        their objectives."""
        left = [(c, one) for c, one in self.found.contenders.left.items() if c.pipeline > 1 and one.ranks]
        return [self.found.contender(c, outcome) for c, outcome in left if (c.virtual_stages > 1) == several]

    def _evaluate_for_overlapped_transfers(self, slowest: float) -> None:
        """Evaluate the most promising pipelines with several stages on each rank that were ruled out because bounds
        count all their transfers as exposed, if they may take less than `slowest` with overlapped transfers.

        The estimate is the time found with one stage on each rank, times `least_share`, plus the share of the transfers
        by which they slow the work beside them. The rank must have memory for more micro-batches in flight. Where plans
        with several stages contend, plans with fewer stages were compared with them already.
        """
        if asks(self.request.pinned):
            return
        contend = max((found.configuration.virtual_stages for found in self.found.contenders.found), default=1)
        beside, several = 1 - self.engine.groups[0].device.overlapped, []
        for bound, c, family in self.frontier.not_evaluated():
            alone, _ = self.record.with_one_stage(c) or (math.inf, 0.0)
            roomy = c.virtual_stages > contend and self.record.is_roomy(c)
            if roomy and family is not None and alone * least_share(c) < slowest:
                transfers = family.transfer_seconds(c)
                several.append((alone * least_share(c) + beside * transfers, c.tie, bound, c, family, transfers))
        for promise, _, bound, c, family, transfers in sorted(several, key=lambda one: one[:2])[:_REORDERED]:
            cutoff, hint = slowest + transfers, self.evaluator.hint_for(family)
            if promise < slowest and family.priced_seconds(c, hint, cutoff) < cutoff:
                with contextlib.suppress(NothingAgreesError):
                    outcome = self.engine.evaluate(c, cutoff=cutoff, hint=hint)
                    self.evaluator.take(c, outcome, max(bound, outcome.bound))

    def _evaluate_for_deferred_gradients(self, slowest: float, gradients: float, *, piped: bool) -> None:
        """Evaluate the most promising pipelines whose bounds say that another schedule than 1F1B may take less than
        `slowest`.

        Pipelines with more micro-batches than ranks are evaluated only if no plan found is a pipeline, and no more of
        them than are priced: otherwise their bubbles were already compared with those of the pipelines found. Each
        pipeline is first bounded at the price of memory that mattered last.
        """
        left = self.found.contenders.left
        queue = [
            (apart_seconds(c, bound := max(known, self.engine.bound(c)), gradients), c.tie, bound, c, family)
            for known, c, family in self.frontier.not_evaluated()
            if 1 < c.pipeline >= c.micro_batches * piped and c.virtual_stages == 1 and c not in left
        ]
        heapq.heapify(queue)
        least, evaluated, many, missed = slowest * (1 - WORTH), 0, 0, 0
        while queue and queue[0][0] < least and evaluated - many < _FOR_OTHER_ORDERS and missed < _MISSES:
            if self.cancelled():
                return
            _, order, bound, c, family = heapq.heappop(queue)
            if c.micro_batches > c.pipeline and many == _REORDERED:
                continue
            cutoff = in_1f1b(c, least, gradients)
            if family is not None:
                bound = max(bound, family.priced_seconds(c, self.evaluator.hint_for(family), cutoff))
                heapq.heappush(queue, (apart_seconds(c, bound, gradients), order, bound, c, None))  # bounded already
                continue
            evaluated += 1
            many += c.micro_batches > c.pipeline
            with contextlib.suppress(NothingAgreesError):
                outcome = self.engine.evaluate(c, cutoff=cutoff)
                self.evaluator.take(c, outcome, max(bound, outcome.bound))
                promise = apart_seconds(c, outcome.seconds, gradients) if outcome.ranks else math.inf
                missed = 0 if promise < least * (1 + _NEAR) else missed + 1


def _most_promising(promises: list[tuple[float, Contender]], below: float) -> list[Contender]:
    """The contenders that promise least, if that is `below` so many seconds."""
    promising = [(promise, one) for promise, one in promises if promise < below]
    return [one for _, one in sorted(promising, key=lambda each: (each[0], each[1].order))[:_REORDERED]]
