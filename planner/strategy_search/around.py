"""Helpers for searches around the best plan: their progress and their results."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from hardware_profiles import Cluster
from planner.strategy_search.engine.families import Shared
from planner.strategy_search.engine.proofs import Ranked
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.result import Progress, SearchResult, Statistics
from planner.strategy_search.search import least_in_a_v

Listener = Callable[[Progress], None]
Stop = Callable[[], bool]


def exact(request: SearchRequest) -> bool:
    """Whether the search is the exact one, of all configurations, on devices of one kind. Searches around its plan are
    exact in the same sense."""
    return request.algorithm == "dynamic_programming" and request.prune and isinstance(request.cluster, Cluster)


def in_a_v(ranked: Ranked) -> bool:
    """Whether a plan has its stages in a V."""
    return ranked.plan.schedule_kind.v_shaped


def bound_of_like(ranked: Ranked, result: SearchResult, request: SearchRequest, shared: Shared) -> float:
    """The lower bound from a result of the request that holds for this plan. If the best plan has its stages one after
    the other, the bound of the result is about such plans; for stages in a V a weaker bound holds.

    Raises LimitError if a limit of the planner is reached.
    """
    if not in_a_v(ranked) or in_a_v(result.plans[0]):
        return result.bound_seconds
    return min(result.bound_seconds, least_in_a_v(request, shared))


def together(first: Statistics, second: Statistics) -> Statistics:
    """The statistics of two searches, one after the other."""
    return replace(
        first,
        configurations=first.configurations + second.configurations,
        evaluated=first.evaluated + second.evaluated,
        solved=first.solved + second.solved,
        seconds=first.seconds + second.seconds,
    )


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
