"""Helpers for searches around the best plan: their progress and their results."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from hardware_profiles import Cluster, Seconds
from planner.strategy_search.engine.families import Shared
from planner.strategy_search.finalists.proofs import Ranked, with_proof
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.result import Progress, SearchResult, Statistics
from planner.strategy_search.search import least_in_a_v, least_work

Listener = Callable[[Progress], None]
Stop = Callable[[], bool]


def exact(request: SearchRequest) -> bool:
    """Whether the search is the exact one, of all configurations, on devices of one kind. Searches around its plan are
    exact in the same sense."""
    return request.algorithm == "dynamic_programming" and request.prune and isinstance(request.cluster, Cluster)


def in_a_v(ranked: Ranked) -> bool:
    """Whether a plan has its stages in a V."""
    return ranked.plan.schedule_kind.v_shaped


def axes_of(ranked: Ranked) -> int:
    """How many axes have more than one device: the bound of a search covers meshes of one and two axes."""
    return sum(size > 1 for size in ranked.plan.mesh.sizes)


def bound_of_like(ranked: Ranked, result: SearchResult, request: SearchRequest, shared: Shared) -> float:
    """The lower bound from a result of the request that holds for this plan. Weaker bounds hold for stages in a V and
    for sequences in slices than for the others (`planner.strategy_search.exploration.plan_proofs`), whatever the best
    plan of the result is.

    Raises LimitError if a limit of the planner is reached.
    """
    best = result.plans[0]
    if _apart(ranked) == _apart(best):
        return result.bound_seconds
    usual = result.usual_seconds if any(_apart(best)) and result.usual_seconds else result.bound_seconds
    if in_a_v(ranked):
        usual = min(usual, least_in_a_v(request, shared))
    return min(usual, least_work(request, shared)) if ranked.plan.slices > 1 else usual


def _apart(ranked: Ranked) -> tuple[bool, bool]:
    """Why a weaker bound holds for a plan than for others: stages in a V, sequences in slices."""
    return in_a_v(ranked), ranked.plan.slices > 1


def together(first: Statistics, second: Statistics) -> Statistics:
    """The statistics of two searches, one after the other."""
    return replace(
        first,
        configurations=first.configurations + second.configurations,
        evaluated=first.evaluated + second.evaluated,
        solved=first.solved + second.solved,
        seconds=first.seconds + second.seconds,
        stopped_by=first.stopped_by or second.stopped_by,
    )


def or_faster(result: SearchResult, found: SearchResult, bound: Seconds) -> SearchResult:
    """The result with the best plan of a search around its own, of which `bound` holds, if that is faster. The proof
    covers it if it covers both, on meshes of one and two axes."""
    (first, *_), best = found.plans, result.plans[0]
    result = replace(result, statistics=together(result.statistics, found.statistics))
    if first.seconds >= best.seconds:
        return result
    covered = result.covered and found.covered and axes_of(first) <= 2
    proved = with_proof(first, bound, covered=covered)
    priced = (*found.priced, *result.priced)
    return replace(result, plans=(proved,), priced=priced, covered=covered, bound_seconds=bound)


def fastest_of(plans: Sequence[Ranked], top: int) -> tuple[Ranked, ...]:
    """The `top` fastest plans, fastest first."""
    return tuple(sorted(plans, key=lambda one: one.seconds))[:top]


def told(on_progress: Listener, result: SearchResult, phase: str) -> Listener:
    """Reports the progress of a search around the best plan, which is never worse than what is known."""

    def tell(progress: Progress) -> None:
        best = min(progress.best_seconds, result.plans[0].seconds)
        bound = result.bound_seconds if math.isfinite(result.bound_seconds) else progress.bound_seconds
        on_progress(replace(progress, best_seconds=best, bound_seconds=bound, phase=phase))

    return tell
