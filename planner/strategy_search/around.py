"""Searches around the best plan: what they tell while they run, and what comes of them."""

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
    """Whether the search is the exact one, of all configurations, on devices of one kind: what is searched around its
    plan is searched likewise."""
    return request.algorithm == "dynamic_programming" and request.prune and isinstance(request.cluster, Cluster)


def in_a_v(ranked: Ranked) -> bool:
    """Whether a plan has its stages in a V."""
    return ranked.plan.schedule_kind.v_shaped


def bound_of_like(ranked: Ranked, result: SearchResult, request: SearchRequest, shared: Shared) -> float:
    """What no plan of a request that is like one takes less than, by a result of it. Where the best plan has stages
    that lie one after the other, its bound is about such; of stages in a V less is known.

    Raises LimitError where a limit of the planner is reached.
    """
    if not in_a_v(ranked) or in_a_v(result.plans[0]):
        return result.bound_seconds
    return min(result.bound_seconds, least_in_a_v(request, shared))


def together(first: Statistics, second: Statistics) -> Statistics:
    """Of two searches, one after the other."""
    return replace(
        first,
        configurations=first.configurations + second.configurations,
        evaluated=first.evaluated + second.evaluated,
        solved=first.solved + second.solved,
        seconds=first.seconds + second.seconds,
    )


def fastest_of(plans: Sequence[Ranked], top: int) -> tuple[Ranked, ...]:
    """So many plans, the fastest first."""
    return tuple(sorted(plans, key=lambda one: one.seconds))[:top]


def told(on_progress: Listener, result: SearchResult, phase: str) -> Listener:
    """Tells of a search around the best plan, which is never worse than what is known."""

    def tell(progress: Progress) -> None:
        best = min(progress.best_seconds, result.plans[0].seconds)
        bound = result.bound_seconds if math.isfinite(result.bound_seconds) else progress.bound_seconds
        on_progress(replace(progress, best_seconds=best, bound_seconds=bound, phase=phase))

    return tell
