"""Other plans for the job of a reported plan, and what they say about its decisions.

    plans that the search for this plan priced,
    listed in its file; otherwise another search  ─▶ the best plan of each of the best configurations
    conventional plans, by hand                  ─▶ baselines
    the configuration of the plan, with another
    stage of ZeRO or recomputation               ─▶ what it costs to change these decisions

The search runs to its end, so that a busy machine shows the same plans. Ctrl-C and --time-limit end it earlier, with
the plans found so far.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from planner.cli.waiting import Waiting
from planner.errors import InfeasibleError, LimitError, PlannerError

if TYPE_CHECKING:
    from hardware_profiles import Machine
    from planner.plan.binding.bind import BoundPlan
    from planner.plan.binding.model_of import PlannedModel
    from planner.plan.compare.verify import Verdict
    from planner.plan.layout.roles import Roles
    from planner.plan.plan import Plan
    from planner.report.data import Choice, Choices
    from planner.strategy_search.request.request import SearchRequest
    from planner.strategy_search.request.space import Pinned

CANDIDATES = 5
"""Number of configurations whose best plans are shown."""


def other_plans(
    verdict: "Verdict",
    model: "PlannedModel",
    cluster: "Machine",
    time_limit: float | None,
    wait: Waiting,
    stopped: Callable[[], bool],
) -> "Choices":
    """The candidates of a search for the same job, conventional plans, the plan itself, and its explanation; only those
    known so far once it is `stopped`."""
    from planner.limits import default_memory, limited
    from planner.report.data import Choices, reasons_of
    from planner.strategy_search.analysis.around import request_for

    plan = verdict.bound.plan
    request = request_for(plan, model.graph, model.batch, cluster)
    own = choice_of(verdict.bound, verdict.prediction.step_seconds, verdict.prediction.peak_bytes, this=True)
    ends = math.inf if time_limit is None else time.monotonic() + time_limit
    asking = _Asking(request, wait, lambda: stopped() or time.monotonic() > ends)
    with limited(None if time_limit is None else max(0.0, time_limit), default_memory()):
        candidates = plans_named(plan, own)
        if not candidates:
            wait.phase("other plans")
            candidates = asking.plans(replace(request, top=CANDIDATES)) or []
        conventional = [*_baselines(verdict, cluster, asking)]
        changed = [*_changed(verdict, own, asking)]
    late = asking.over()
    others = [*candidates, *conventional]
    lacking = [(decision, words) for decision, words, found in changed if found is None]
    near = [found for _, _, found in changed if found is not None]
    return Choices(
        plans=_together(own, others),
        note=_note(len(candidates), late),
        reasons=reasons_of(own, [*others, *near], lacking),
    )


def plans_named(plan: "Plan", own: "Choice") -> "list[Choice]":
    """The plans that the search for this plan priced; none if the plan was changed since."""
    from planner.report.data import Choice

    found = [
        Choice(step_seconds=one.step_seconds, peak_bytes=one.peak_bytes, words=one.words) for one in plan.candidates
    ]
    return found if any(_same(one, own) for one in found) else []


def _note(candidates: int, late: bool) -> str:
    words = (
        f"The best plan of each of the {candidates} best configurations, searched with nothing fixed, and conventional"
        " plans."
        if candidates > 1
        else "Conventional plans."
        if candidates
        else "No other plan was found."
    )
    return f"{words} The search was stopped before its end; there may be faster plans." if late else words


@dataclass(frozen=True, slots=True)
class _Asking:
    """Runs searches for one job until it is stopped."""

    request: "SearchRequest"
    wait: Waiting
    over: Callable[[], bool]

    def plans(self, request: "SearchRequest", name: str = "") -> "list[Choice] | None":
        """The best plans of a request; None if nothing fits, empty if the job allows none or the search was stopped
        before there was one."""
        from planner.strategy_search.search import search

        if self.over():
            return []
        try:
            found = search(request, self.wait.searched, self.over)
        except LimitError:
            return []
        except InfeasibleError:
            return [] if self.over() else None
        except PlannerError:  # degrees that do not divide, a model without such operators
            return []
        return [choice_of(one.bound, one.seconds, one.plan.prediction.peak_bytes, name=name) for one in found.plans]


def _baselines(verdict: "Verdict", cluster: "Machine", asking: _Asking) -> "Iterator[Choice]":
    """Plans that a person would write: FSDP over all devices; tensor parallelism inside a node with ZeRO 1."""
    from hardware_profiles import Cluster
    from planner.strategy_search.request.space import Pinned

    plan = verdict.bound.plan
    if not isinstance(cluster, Cluster) or not plan.schedule_kind.trains or cluster.devices == 1:
        return
    offload = asking.request.pinned.offload
    conventional = {"FSDP over all devices": Pinned(pipeline=1, tensor=1, context=1, zero=3, offload=offload)}
    node = cluster.levels[0].fan_out
    if node is not None and 1 < node <= cluster.devices:
        name = f"tensor parallel {node} inside a node, ZeRO 1"
        conventional[name] = Pinned(tensor=node, context=1, zero=1, offload=offload)
    for name, pinned in conventional.items():
        asking.wait.phase(name)
        yield from (asking.plans(replace(asking.request, pinned=pinned), name) or [])[:1]


def _changed(verdict: "Verdict", own: "Choice", asking: _Asking) -> "Iterator[tuple[str, str, Choice | None]]":
    """The plan's degrees and micro-batches with another ZeRO stage, or with all blocks run in one way: the decision,
    its other value, and the best plan (None if none fits). Unknown results are left out."""
    from planner.plan.layout.roles import roles

    plan = verdict.bound.plan
    degrees = degrees_of(roles(verdict.bound))
    if degrees is None or not plan.schedule_kind.trains:
        return
    here = dict(own.words)
    kept = replace(degrees, micro_batches=plan.training.micro_batches, offload=asking.request.pinned.offload)
    shared = degrees.data or 1
    trials = [("ZeRO", str(stage), replace(kept, zero=stage)) for stage in (2, 1, 0) if shared > 1]
    trials += [("recomputation", way, replace(kept, recompute=way)) for way in ("none", "full")]
    for decision, words, pinned in trials:
        if here.get(decision, "").split(" ")[0] == words:
            continue
        asking.wait.phase(f"{decision} {words}")
        found = asking.plans(replace(asking.request, pinned=pinned))
        if found is None or found:
            yield decision, words, found[0] if found else None


def degrees_of(found: "Roles") -> "Pinned | None":
    """The degrees of a plan as a decision; None if their product is not its number of devices."""
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


def choice_of(bound: "BoundPlan", seconds: float, peak: float, *, this: bool = False, name: str = "") -> "Choice":
    """A plan in the words that tell it apart from others."""
    from planner.plan.layout.roles import roles
    from planner.plan.words import plan_words
    from planner.report.data import Choice

    words = tuple(plan_words(bound, roles(bound)).items())
    return Choice(step_seconds=seconds, peak_bytes=peak, words=words, this=this, name=name)


def _together(own: "Choice", others: "Sequence[Choice]") -> "tuple[Choice, ...]":
    """Every plan once, fastest first; a conventional plan that equals another one gives it its name."""
    plans = [own]
    for one in others:
        at = next((at for at, other in enumerate(plans) if _same(one, other)), None)
        if at is None:
            plans.append(one)
        elif one.name:
            plans[at] = replace(plans[at], name=one.name)
    return tuple(sorted(plans, key=lambda one: (one.step_seconds, one.peak_bytes)))


def _same(one: "Choice", other: "Choice") -> bool:
    """Whether two plans are the same: in words, step time and memory."""
    figures = ((one.step_seconds, other.step_seconds), (one.peak_bytes, other.peak_bytes))
    return one.words == other.words and all(math.isclose(here, there, rel_tol=1e-6) for here, there in figures)
