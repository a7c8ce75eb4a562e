"""Best-first search over families of configurations, then over their members (best-first branch and bound).

    evaluate the conventional configurations: the first incumbent                            (Attempt)
    put all families into the frontier, each with the bound of its work                      (Frontier)
    while the lowest bound of the frontier is below the cutoff:                              (Found.cutoff)
        take the entry with the lowest bound
        a family              replace it by its members, each with the bound that the largest micro-batch proves
        virtual stages        postpone them until their configuration with one stage on each rank is done
        a higher bound is known, at another price of memory    put it back with that
        a member              evaluate it: a plan, and a better bound                        (Evaluator)
    evaluate the postponed configurations                                                    (VirtualStages)
    try the best plan on meshes of three and four axes
    price the contenders as plans; if these take longer than their objectives, search on     (Finalists, OtherSchedules)

The lowest bound over all entries, evaluated or not, bounds every plan (`LowerBounds`). Objectives are sums, steps are
simulated. So plans whose objectives are close to the lowest contend, and the cutoff is a little above the lowest.
"""

from collections.abc import Callable, Sequence

from planner.errors import LimitError
from planner.limits import check
from planner.plan.plan import Prediction
from planner.plan.prediction.walk.stage_cost import ACCUMULATION, FORWARD
from planner.strategy_search.engine.assemble import assembly
from planner.strategy_search.engine.contenders import Contender
from planner.strategy_search.exploration.early_plans import EarlyPlans
from planner.strategy_search.exploration.evaluator import Evaluator
from planner.strategy_search.exploration.frontier import Bounded, Entry
from planner.strategy_search.exploration.other_schedules import OtherSchedules
from planner.strategy_search.exploration.virtual_stages import VirtualStages
from planner.strategy_search.finalists.finalists import Finalists
from planner.strategy_search.finalists.proofs import Ranked


class BestFirst:
    """Explores the families of a request, the lowest bound first."""

    def __init__(self, evaluator: Evaluator, early: EarlyPlans, cancelled: Callable[[], bool]) -> None:
        self.evaluator, self.early, self.cancelled = evaluator, early, cancelled
        self.engine, self.request = evaluator.engine, evaluator.engine.request
        self.found, self.bounds, self.report = evaluator.found, evaluator.bounds, evaluator.report
        self.frontier, self.families = evaluator.frontier, evaluator.families
        self.virtual_stages = VirtualStages(evaluator, early, cancelled)
        self.other_schedules = OtherSchedules(evaluator, cancelled)

    def explore(self) -> bool:
        """Look for the best contenders. Returns whether the search was stopped before its end."""
        if self._evaluate_promising():
            return True
        self.found.take_incumbent()
        self._refine()
        return False

    def _evaluate_promising(self) -> bool:
        """Evaluate the configurations whose bound is below the cutoff. Returns whether the search was stopped before
        its end."""
        while self.frontier.least < self.found.cutoff:
            if self.cancelled():
                return True
            check()
            if self.frontier.least >= self.found.contenders.best:
                self.early.make_best()
            entry = self.frontier.pop()
            try:
                self._take_up(entry)
            except (LimitError, MemoryError):
                self.bounds.cover(entry.bound)  # the entry just taken may hold the best plan
                raise
        return self.virtual_stages.evaluate()

    def _take_up(self, entry: Entry) -> None:
        """Do with an entry what comes next: rule it out, open it, postpone it, raise its bound, or evaluate it."""
        first = entry.members[0]
        if self.early.rules_out(first, entry.bound):
            self._cut_off(entry)
        elif entry.is_closed:
            self._open(entry)
        elif self.families.waits_for_plain(first):
            self.frontier.postponed.append(Bounded(entry.bound, first, entry.family))
        elif not self._raised(entry):
            self.evaluator.evaluate(first, entry.family, entry.bound)

    def _cut_off(self, entry: Entry) -> None:
        """Note the bounds of an entry that is not looked at any further."""
        for c in entry.members:
            bound = self.families.bound_in_family(c, entry.bound) if entry.is_closed else entry.bound
            self.bounds.note(c, bound)
            self.frontier.cut_off.append(Bounded(bound, c, entry.family))

    def _open(self, entry: Entry) -> None:
        """Replace a family by its members, unless a better bound is known for many families at once. It then goes back
        into the queue."""
        regions, usual = self.families.regions, self.families.usual(entry.members)
        better = None if regions is None else regions.better(usual, entry.bound)
        if better is None:
            self.frontier.open_family(entry.members, entry.bound, self.found.cutoff)
        else:
            self.frontier.push(better, entry.members)

    def _raised(self, entry: Entry) -> bool:
        """Whether the bound of many families, or a price of memory that mattered elsewhere, raises a configuration's
        bound. It then goes back into the queue."""
        regions, (configuration,), family = self.families.regions, entry.members, entry.family
        if regions is not None and (own := regions.with_its_micro_batch(configuration)) > entry.bound:
            self.frontier.push(own, entry.members, family, entry.hint)
            return True
        if family is None:
            return False
        hint = self.evaluator.hint_for(family)
        if hint == entry.hint:
            return False
        better = max(entry.bound, family.priced_seconds(configuration, hint, self.found.cutoff))
        self.frontier.push(better, entry.members, family, hint)
        return True

    def _refine(self) -> None:
        """Try whether the best plan gets faster on a mesh of three or four axes. Such meshes are not searched
        exhaustively."""
        found = self.found.contenders.found
        if not found or self.request.algorithm != "dynamic_programming" or not self.request.prune:
            return
        self.report("refining")
        best = found[0]
        c = best.configuration
        whole = assembly(best.pipeline_of_kinds.chain, best.outcome.ranks, self.engine.setting(c))
        refined = self.engine.refined(c, whole, best.objective, best.outcome.gathers)
        if refined is not None:
            adopted = self.engine.adopt(c, refined)
            self.evaluator.take(adopted, self.engine.evaluate(adopted), best.outcome.bound)

    def search_on(self, finalists: Finalists, plans: tuple[Ranked, ...]) -> tuple[Ranked, ...]:
        """Search on if the best plans take longer than the objectives that ruled others out.

        First come configurations that contended until better objectives were found, then configurations that were not
        evaluated and may be faster than the best of these plans. Two kinds of pipelines are tried as well: those ruled
        out by the bubble of 1F1B, if another schedule may make them faster, and those ruled out by exposed transfers
        between virtual stages.
        """
        if not self.request.prune or self.request.tolerance > 0:
            return plans
        contenders = self.found.contenders
        contended = {id(one) for one in contenders.found}
        others = self._in_other_schedules(plans)
        if others or not contended.issuperset(map(id, contenders.found)):
            plans = self._plans(finalists, others)
        slowest = self._slowest(plans)
        if slowest <= contenders.cutoff:
            return plans
        self.report("searching on")
        contenders.step, self.early.best = slowest, self.early.best and plans[0]
        again = [(c, outcome) for c, outcome in contenders.left.items() if outcome.seconds < slowest]
        for c, outcome in again:
            contenders.add(self.found.contender(c, outcome))
        if again:
            plans = self._plans(finalists, others)
            contenders.step = self._slowest(plans)
        self.frontier.put_back()
        return plans if self._evaluate_promising() else self._plans(finalists, others)

    def _in_other_schedules(self, plans: Sequence[Ranked]) -> list[Contender]:
        """Pipelines that another schedule may make faster than these plans."""
        slowest, piped = self._slowest(plans), any(one.plan.pipeline > 1 for one in plans)
        gradients = min(_of_weight_gradients(one.plan.prediction) for one in plans)
        others = self.other_schedules.with_deferred_gradients(slowest, gradients, piped=piped)
        return others + self.other_schedules.with_virtual_stages(slowest)

    def _plans(self, finalists: Finalists, others: Sequence[Contender]) -> tuple[Ranked, ...]:
        """The best plans of the contenders by objective, and of `others` whose configurations do not contend."""
        found = self.found.contenders.found
        contending = {one.configuration for one in found}
        finalists.found = [*found, *(one for one in others if one.configuration not in contending)]
        return finalists.plans()

    def _slowest(self, plans: Sequence[Ranked]) -> float:
        """Seconds of the slowest of the `top` plans that the request asks for, or from which on plans are of no
        interest."""
        return min(plans[min(self.request.top, len(plans)) - 1].seconds, self.found.limit)


def _of_weight_gradients(prediction: Prediction) -> float:
    """An upper estimate of the seconds of a step that weight gradients take. Their matrix products take no longer than
    a forward pass, which runs other operators too; adding the gradients up comes on top."""
    time = dict(prediction.time)
    return time[FORWARD] + time.get(ACCUMULATION, 0.0)
