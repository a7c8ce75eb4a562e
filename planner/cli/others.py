"""Other plans for the job of a plan that is reported: fronts of time against memory, searched while somebody waits."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from planner.cli.stopping import stoppable
from planner.cli.waiting import Waiting
from planner.errors import PlannerError

if TYPE_CHECKING:
    from hardware_profiles import Machine
    from planner.plan.binding.bind import BoundPlan
    from planner.plan.binding.model_of import PlannedModel
    from planner.plan.compare.verify import Verdict
    from planner.plan.layout.roles import Roles
    from planner.report.data import Choice, Choices
    from planner.strategy_search.request.request import SearchRequest
    from planner.strategy_search.request.space import Pinned
    from planner.strategy_search.result import SearchResult

_KEPT = 1 / 3
"""Of the time at most for plans with the degrees of the plan; the rest is for those with nothing decided."""


def other_plans(
    verdict: "Verdict",
    model: "PlannedModel",
    cluster: "Machine",
    time_limit: float,
    wait: Waiting,
) -> "Choices":
    """The front of time against memory for the same job, that with the degrees of this plan kept, and the plan itself.

    Ctrl-C ends the search with what there is: the page is worth having all the same.
    """
    from hardware_profiles import Cluster
    from planner.limits import default_memory, limited
    from planner.plan.layout.roles import roles
    from planner.report.units import seconds_text
    from planner.strategy_search.analysis.around import request_for

    plan = verdict.bound.plan
    found = roles(verdict.bound)
    request = request_for(plan, model.graph, model.batch, cluster)
    if isinstance(request.update.buckets, int):  # other plans have buckets of their own sizes
        request = replace(request, update=replace(request.update, buckets="auto"))
    own = _choice(verdict.bound, verdict.prediction.step_seconds, verdict.prediction.peak_bytes, this=True)
    begun, kept = time.monotonic(), degrees_of(found)
    with stoppable(lambda: wait.phase("stopping")) as stopped:
        fronts = []
        for pinned, share in ((kept, _KEPT), (None, 1.0)):
            if kept is None and share < 1:
                continue
            over = _Over(ends=begun + share * time_limit, stopped=stopped)
            wait.phase("with these degrees" if pinned else f"other plans, {seconds_text(time_limit)} at most")
            asked = request if pinned is None else replace(request, pinned=pinned)
            with limited(max(0.0, over.ends - time.monotonic()), default_memory()):
                fronts.append([*_front(asked, wait, over, kept=pinned is not None)])
        late = over()
        after = "by Ctrl-C" if stopped() else f"after {seconds_text(time_limit)}"
    late_words = f"The search was stopped {after}, so there may be more and faster ones." if late else ""
    return _together(own, fronts, late_words, front=isinstance(cluster, Cluster))


def degrees_of(found: "Roles") -> "Pinned | None":
    """The degrees of a plan as a decision; None where they do not make all of its devices."""
    from planner.strategy_search.request.space import Pinned

    if found.replicated > 1:
        return None
    return Pinned(
        pipeline=found.pipeline,
        data=found.data,
        tensor=found.tensor,
        context=found.context,
        context_by="auto" if found.context > 1 else "heads",
        expert=found.expert if found.expert > 1 else None,
    )


@dataclass(frozen=True, kw_only=True)
class _Over:
    """Whether a search is to end."""

    ends: float
    stopped: Callable[[], bool]

    def __call__(self) -> bool:
        return self.stopped() or time.monotonic() > self.ends


def _front(request: "SearchRequest", wait: Waiting, over: _Over, *, kept: bool) -> "Iterator[Choice]":
    """The points of a front whose search was not stopped, as that would be of any quality; the first one all the
    same. Of several kinds of devices just the fastest plan: no front is searched there."""
    from hardware_profiles import MixedCluster
    from planner.strategy_search.objectives import front
    from planner.strategy_search.search import search

    try:
        found: tuple[SearchResult, ...]
        if isinstance(request.cluster, MixedCluster):
            found = (search(request, wait.searched, over),)
        else:
            found = front(request, wait.searched, over)
    except PlannerError:  # nothing fits, or the degrees are none of those that are searched
        return
    for at, result in enumerate(found):
        if at == 0 or not result.statistics.stopped:
            best = result.plans[0]
            yield _choice(best.bound, best.seconds, best.plan.prediction.peak_bytes, kept=kept)


def _choice(bound: "BoundPlan", seconds: float, peak: float, *, this: bool = False, kept: bool = False) -> "Choice":
    from planner.plan.layout.roles import roles
    from planner.plan.words import plan_words
    from planner.report.data import Choice

    words = tuple(plan_words(bound, roles(bound)).items())
    return Choice(step_seconds=seconds, peak_bytes=peak, words=words, this=this, kept=kept)


def _together(own: "Choice", fronts: "Sequence[Sequence[Choice]]", late: str, *, front: bool) -> "Choices":
    """All of them once, fastest first, and where they are from."""
    from planner.report.data import Choices

    plans = [own]
    for one in (one for points in reversed(fronts) for one in points):  # what needs no degrees kept counts as free
        if not any(_same(one, other) for other in plans):
            plans.append(one)
    note = "Nothing else was found."
    if len(plans) > 1:
        note = (
            "The front of a search for the same job with nothing decided by hand: the fastest plan, then the fastest"
            " found with a tenth less memory each."
            if front
            else "The fastest plan of a search for the same job with nothing decided by hand."
        )
        if any(one.kept for one in plans):
            note += " The same with the degrees of this plan kept."
    return Choices(
        plans=tuple(sorted(plans, key=lambda one: (one.step_seconds, one.peak_bytes))),
        note=f"{note} {late}".rstrip(),
    )


def _same(one: "Choice", other: "Choice") -> bool:
    """Whether two plans are one: in their words, in what they take and in what they hold."""
    figures = ((one.step_seconds, other.step_seconds), (one.peak_bytes, other.peak_bytes))
    return one.words == other.words and all(math.isclose(here, there, rel_tol=1e-6) for here, there in figures)
