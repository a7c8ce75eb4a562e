"""One attempt to answer a request, with the memory that it may use: begin, explore, make plans of the best contenders.

    begin      list the families; find a conventional plan, so that a search that is stopped has an answer
    explore    evaluate configurations                                   (best_first, or by_recursion)
    plans      of the contenders, priced by their schedules; search on if they take longer than their objectives

What is known meanwhile is in five places:

    families   the configurations, and what bounds them beforehand
    frontier   those that are not evaluated, each with a lower bound
    record     what evaluations gave
    found      the best plans, and the cutoff
    bounds     what is proved
"""

import logging
import math
import time
from typing import NoReturn, Protocol

from hardware_profiles import Bytes
from planner.errors import LimitError, StoppedBy
from planner.limits import finishing, limit_of, seconds_after, seconds_left, sooner
from planner.strategy_search.engine.families import Shared, engine_of
from planner.strategy_search.engine.incumbent import conventional
from planner.strategy_search.engine.outcome_words import configuration_words, nothing_fits
from planner.strategy_search.engine.scheduling import assumed
from planner.strategy_search.exploration.best_first import BestFirst
from planner.strategy_search.exploration.by_recursion import ByRecursion
from planner.strategy_search.exploration.early_plans import EarlyPlans
from planner.strategy_search.exploration.evaluator import Evaluator
from planner.strategy_search.exploration.families import Families
from planner.strategy_search.exploration.found import Found
from planner.strategy_search.exploration.frontier import Frontier
from planner.strategy_search.exploration.lower_bounds import LowerBounds
from planner.strategy_search.exploration.options import SearchOptions
from planner.strategy_search.exploration.plan_proofs import PlanProofs
from planner.strategy_search.exploration.record import Record
from planner.strategy_search.exploration.reporter import Reporter
from planner.strategy_search.finalists.finalists import Finalists
from planner.strategy_search.finalists.proofs import OPTIMAL, Ranked
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.result import SearchResult, Statistics

_LOG = logging.getLogger(__name__)
"""Reports the configurations that were never evaluated, at level INFO."""


class Explorer(Protocol):
    """The order in which an algorithm evaluates configurations."""

    def explore(self) -> bool:
        """Look for the best contenders. Returns whether the search was stopped before its end."""

    def search_on(self, finalists: Finalists, plans: tuple[Ranked, ...]) -> tuple[Ranked, ...]:
        """Search on if the best plans take longer than the objectives that ruled others out. Returns the best plans."""


class Attempt:
    """One attempt to answer a request.

    `shared`: what several searches build once. `settles`: whether a known plan is the answer if no better plan fits.
    `limits`: the highest predicted peak, in bytes, that a plan may have on a device of each group, if that is not what
    the request's memory allows. `with_more_memory`: the bound proved by earlier attempts, which had more memory.

    Attributes:
        memory: the highest predicted peak, in bytes, that the memory of the request allows on a device.
    """

    def __init__(
        self,
        request: SearchRequest,
        options: SearchOptions,
        shared: Shared,
        *,
        settles: bool = False,
        limits: tuple[Bytes, ...] | None = None,
        with_more_memory: float = math.inf,
    ) -> None:
        self.started = time.perf_counter()
        self.request, self.cancelled = request, options.cancelled
        self.engine, prepared = engine_of(request, shared)
        own_limits = [self.engine.limit_bytes(group) for group in self.engine.groups]
        self.memory = max(own_limits)
        self.limits = tuple(one * (1 + OPTIMAL) for one in own_limits) if limits is None else limits
        self.families = Families(self.engine, options.among, options.bounds)
        self.frontier = Frontier(self.families)
        self.record = Record(self.engine)
        self.found = Found(self.engine, options.cutoff, options.known)
        self.bounds = LowerBounds(self.frontier, self.found, with_more_memory)
        self.proofs = PlanProofs(self.families)
        self.report = Reporter(options.on_progress, self.families, self.record, self.found, self.bounds)
        self.evaluator = Evaluator(
            self.engine, self.frontier, self.found, self.bounds, self.record, self.report, options.takes
        )
        self.early = EarlyPlans(self.engine, prepared, self.limits, self.found, settles=settles)
        self.priced: tuple[Ranked, ...] = ()  # contenders that became plans
        self.stopped_by: StoppedBy | None = None
        self.explorer: Explorer = (
            ByRecursion(self.evaluator, self.cancelled)
            if request.algorithm == "recursive_programming"
            else BestFirst(self.evaluator, self.early, self.cancelled)
        )

    def run(self) -> SearchResult:
        """Search until nothing better is left, the user cancels, or a limit of the planner is reached."""
        try:
            with finishing():
                self._begin()
            with sooner(2.5 * self.early.pricing - seconds_after() / 2):  # other plans are settled as well when priced
                self.stopped_by = "interrupt" if self.explorer.explore() else None
            return self._result()
        except (LimitError, MemoryError) as error:
            if self.found.best == math.inf:
                raise
            self.stopped_by = limit_of(error)
        with finishing():
            return self._result()

    def _begin(self) -> None:
        """List the families and look for the incumbent; with a time limit, make it a plan at once. Without a limit
        there is none where a cutoff or a known plan already rules out slower plans."""
        self.families.list_all()
        self.frontier.add_families()
        hurried = seconds_left() < math.inf
        other = self.request.algorithm == "recursive_programming" or self.engine.spreads
        beaten = min(self.found.limit, self.found.best) < math.inf
        if self.engine.hopeless or not self.request.prune or ((other or beaten) and not hurried):
            return
        self.report()
        for smallest, *others in conventional(self.engine, self.families.all):
            if self.cancelled():
                return
            if self.evaluator.try_first(smallest):
                all(self.evaluator.try_first(larger) for larger in others)  # stops when one is slower or does not fit
                break
        self.report()
        if self.found.incumbent is not None and hurried:
            self.early.make_incumbent()

    def _result(self) -> SearchResult:
        if self.found.best == math.inf:
            self._raise_nothing_found()
        self.report("scheduling the best")
        bound = self.bounds.at_the_end()
        self._note_unevaluated()
        plans = self._plans(bound)
        proved = self.bounds.at_the_end()  # as more was evaluated after the search
        if proved > bound:
            bound, plans = proved, self.proofs.with_bounds(plans, proved)
        pinned = self.request.pinned
        return SearchResult(
            plans=plans,
            priced=self.priced,
            bound_seconds=self.proofs.bound_of(plans[0], bound),
            usual_seconds=0.0 if pinned.in_a_v or (pinned.slices or 1) > 1 else bound,
            covered=self.proofs.covers(plans[0].configuration),
            contexts=self.record.contexts.outcomes(),
            limits=self.limits,
            close=tuple(found.configuration for found in self.found.contenders.found),
            bounds=self.bounds.of_each(),
            bounds_with_any_memory=self.families.with_any_memory,
            assumed=assumed(self.request, self.families.space),
            statistics=Statistics(
                configurations=self.families.total,
                evaluated=len(self.record.evaluated),
                solved=self.record.solved,
                seconds=time.perf_counter() - self.started,
                stopped_by=self.stopped_by,
            ),
        )

    def _raise_nothing_found(self) -> NoReturn:
        """Raise why nothing was found: decisions that contradict each other, or memory that is missing."""
        stopped = self.stopped_by is not None
        missing, disagreement = self.record.missing, self.evaluator.disagreement
        if disagreement is not None and not self.record.evaluated:
            raise disagreement
        if missing.needed == math.inf and not stopped and self.found.limit == math.inf:
            self.report("measuring what is missing")
            missing.measure(self.frontier)
        raise nothing_fits(
            self.request, missing.needed, missing.fullest, missing.group, host=self.engine.host, stopped=stopped
        )

    def _note_unevaluated(self) -> None:
        """Note the bounds of entries that are left in the frontier, and log why they were left."""
        for entry in self.frontier.in_order():
            first, ahead, more = entry.members[0], entry.bound, len(entry.members) - 1
            self.record.contexts.note(first, bound=ahead)
            why = f"takes {ahead:.4g} s or more, and a plan of {self.found.best:.4g} s is known"
            why = "nothing fits" if ahead == math.inf else why
            _LOG.info(
                "%s%s: cut off, %s",
                configuration_words(first),
                f" and {more} with other micro-batches" if more else "",
                "the search was stopped" if self.stopped_by else why,
            )

    def _plans(self, bound: float) -> tuple[Ranked, ...]:
        """The best contenders as plans. A search that was stopped returns the incumbent, which is already a plan, if
        nothing better was found or no time is left to make plans of others."""
        early, with_bounds = self.early, self.proofs.with_bounds
        nothing_better = self.found.best < self.found.contenders.best
        if early.incumbent and self.stopped_by and (nothing_better or seconds_left() < early.pricing):
            return with_bounds(early.incumbent, bound)
        self.found.take_incumbent()
        try:
            finalists = early.finalists()
            finalists.maker.bound, finalists.found = bound, self.found.contenders.found
            finalists.of_degrees = self.bounds.of_degrees()
            plans = finalists.plans()
            if not self.stopped_by:
                try:
                    plans = self.explorer.search_on(finalists, plans)
                except LimitError as error:
                    self.stopped_by = error.by
            self.priced = with_bounds(finalists.priced, bound)
            return with_bounds(plans, bound)
        except LimitError:
            if not early.incumbent:
                raise
            return with_bounds(early.incumbent, bound)
