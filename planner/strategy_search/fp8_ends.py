"""The search for layers in fp8, and both of its ends: every layer in fp8 that could be, and none.

    open     the search decides for each layer and strategy       a bound, and a plan
    all      every layer in fp8                                   the plans that are found where that is asked for
    none     no layer in fp8                                      the same
    gathered the first, with weights gathered in fp8, where       a bound of its own, and a plan; the bound of both is
             that can be                                          the lower one

The space of the first has that of the others in it, and its bound holds for them. Its best sums need not be the fastest
steps: what an identity shares out counts as overlapped with whichever reader covers most, and a layer in fp8 covers
nothing. So the ends are searched, too, as if they had been asked for, and no plan is slower than these: three searches
in the place of one, or four.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.errors import InfeasibleError, RequestError
from planner.graph.fp8 import ALL_LAYERS, NO_FP8
from planner.limits import reached, sharing
from planner.strategy_search.engine.proofs import Ranked, with_proof
from planner.strategy_search.request.gathering import may_gather_in_fp8
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration
from planner.strategy_search.result import SearchResult

Solve = Callable[[SearchRequest, float], SearchResult]
"""The best plans of a request whose objectives are below a cutoff."""


def with_fp8_ends(
    request: SearchRequest, solve: Solve, cutoff: float, cancelled: Callable[[], bool] = lambda: False
) -> SearchResult:
    """`solve`, never slower than with all layers in fp8 or with none where the search decides which are.

    Raises what `solve` raises.
    """
    if not request.fp8 or request.fp8_layers == ALL_LAYERS:
        return solve(request, cutoff)
    gathers = may_gather_in_fp8(request)
    ends = ends_of(request)
    with sharing(1 + len(ends) + gathers):
        best = _with_gathered(request, solve, cutoff) if gathers else solve(request, cutoff)
    bound, covered = best.bound_seconds, best.covered
    for number, end in enumerate(ends):
        if cancelled() or reached() or best.statistics.stopped:
            break
        try:
            with sharing(len(ends) - number):
                found = solve(end, cutoff)
        except (InfeasibleError, RequestError):  # nothing fits, or no layer is left
            continue
        plans = _fastest((*best.plans, *found.plans), request.top)
        proved = tuple(with_proof(one, bound, covered=covered and found.covered) for one in plans)
        best = replace(best, plans=proved, priced=(*best.priced, *found.priced))
    return best


def _with_gathered(request: SearchRequest, solve: Solve, cutoff: float) -> SearchResult:
    """The best plans with weights gathered in fp8 and without; the bound is that of both spaces."""
    found, errors = list[SearchResult](), list[InfeasibleError]()
    for fp8 in (request.fp8, replace(request.fp8, gathered=True)):
        try:
            found.append(solve(replace(request, fp8=fp8) if fp8 != request.fp8 else request, cutoff))
        except InfeasibleError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    best, bound = min(found, key=lambda one: one.plans[0].seconds), min(one.bound_seconds for one in found)
    covered = all(one.covered for one in found)
    fastest = _fastest([plan for one in found for plan in one.plans], request.top)
    plans = tuple(with_proof(one, bound, covered=covered) for one in fastest)
    priced = tuple(plan for one in found for plan in one.priced)
    return replace(best, plans=plans, bound_seconds=bound, covered=covered, priced=priced)


def _fastest(plans: Sequence[Ranked], top: int) -> tuple[Ranked, ...]:
    """The fastest plans, of different configurations."""
    of = dict[Configuration, Ranked]()
    for one in sorted(plans, key=lambda one: one.seconds):
        of.setdefault(one.configuration, one)
    return tuple(of.values())[:top]


def ends_of(request: SearchRequest) -> tuple[SearchRequest, ...]:
    """The requests with all layers in fp8, and with none."""
    fp8 = request.fp8
    every = replace(request, fp8_layers=ALL_LAYERS)
    if request.fp8_layers:  # some are to be in fp8
        return (every,)
    others = replace(fp8, left_out=ALL_LAYERS) if fp8.experts or fp8.dispatch else NO_FP8
    return (every, replace(request, fp8=others, fp8_layers=ALL_LAYERS))
