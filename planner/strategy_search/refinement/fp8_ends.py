"""The search over layers in fp8, and its two extremes: every layer in fp8 that can be, and none.

    open     the search decides for each layer and strategy       a bound, and a plan
    all      every layer in fp8                                   the plans that are found where that is asked for
    none     no layer in fp8                                      the same
    gathered the first, with weights gathered in fp8, where       a bound of its own, and a plan; the bound of both is
             that can be                                          the lower one

The space of the first includes that of the others, so its bound holds for them. The plans with its lowest objectives
need not have the fastest steps: the communication that an identity shares out counts as overlapped with whichever
reader overlaps most, and a layer in fp8 overlaps nothing. So the extremes are searched as well, as if they had been
asked for, and no plan is slower than theirs. They come first: the searches after them know their plans, look only for
faster plans, and make few plans of slower ones. With a time limit the open search comes first, as only it gives the
bound.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.errors import InfeasibleError, LimitError, RequestError, StoppedBy
from planner.graph.fp8 import ALL_LAYERS, NO_FP8
from planner.limits import ended_by, finishing, seconds_left, sharing
from planner.strategy_search.engine.families import Shared
from planner.strategy_search.finalists.proofs import Ranked, with_proof
from planner.strategy_search.refinement.around import bound_of_like, in_a_v
from planner.strategy_search.request.gathering import gathering_in_fp8
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration
from planner.strategy_search.result import SearchResult
from planner.strategy_search.search import least_work

Solve = Callable[[SearchRequest, float, Ranked | None], SearchResult]
"""The best plans of a request with objectives below a cutoff; a plan of another request may be known."""


def with_fp8_ends(
    request: SearchRequest, solve: Solve, cutoff: float, cancelled: Callable[[], bool] = lambda: False
) -> SearchResult:
    """`solve`, never slower than with all layers in fp8 or with none, if the search decides which layers are. If a
    limit of the planner leaves out one of these searches, the result counts as stopped; its bound then covers plans
    with other gathers by their work alone.

    Raises what `solve` raises.
    """
    if not request.fp8 or request.fp8_layers == ALL_LAYERS:
        return solve(request, cutoff, None)
    opened, ends = _opened(request), ends_of(request)
    order = (*reversed(ends), *opened) if seconds_left() == math.inf else (*opened, *ends)
    found, of_ends, errors = list[SearchResult](), list[SearchResult](), list[InfeasibleError]()
    asked, late = list[SearchRequest](), list[SearchRequest]()  # the requests of `found`, and open ones left out
    stops = list[StoppedBy]()
    for number, one in enumerate(order):
        is_end = one in ends
        if is_end and found and (by := found[-1].statistics.stopped_by or ended_by(cancelled)):
            stops.append(by)
            break
        alone = request.space is None and request.top == 1
        known = min((each.plans[0] for each in (*found, *of_ends)), key=_seconds, default=None) if alone else None
        try:
            with sharing(len(order) - number):
                (of_ends if is_end else found).append(solve(one, cutoff, known))
                asked += [] if is_end else [one]
        except InfeasibleError as error:  # nothing fits
            errors += [] if is_end else [error]
            if isinstance(error, LimitError):
                stops.append(error.by)
                late += [] if is_end else [one]
        except RequestError:
            if not is_end:  # else no layer is left
                raise
    if not found:
        raise errors[0]
    best = min(found, key=lambda one: _seconds(one.plans[0]))
    work = min((_least_work(one) for one in late), default=math.inf)
    bound = min([work, *(one.bound_seconds for one in found)])
    usual = min([work, *(one.usual_seconds for one in found)])
    covered = all(one.covered for one in found)
    proved = covered and all(one.covered for one in of_ends)
    shared = [Shared() for _ in found]

    def bound_of(plan: Ranked) -> float:
        if not in_a_v(plan):
            return bound
        return min([work, *(bound_of_like(plan, *each) for each in zip(found, asked, shared, strict=True))])

    plans = list[tuple[Ranked, float]]()
    stops += [one.statistics.stopped_by for one in (*found, *of_ends) if one.statistics.stopped_by]
    for plan in _fastest([plan for one in (*found, *of_ends) for plan in one.plans]):
        if len(plans) == request.top:
            break
        try:
            plans.append((plan, bound_of(plan)))
        except LimitError as error:  # before the bound for stages in a V was known; a plan without a V exists
            stops.append(error.by)
    proofs = tuple(with_proof(plan, its, covered=proved) for plan, its in plans)
    priced = tuple(plan for one in (*found, *of_ends) for plan in one.priced)
    result = replace(
        best, plans=proofs, bound_seconds=plans[0][1], usual_seconds=usual, covered=covered, priced=priced,
    )  # fmt: skip
    return result.cut_short(next(iter(stops), None))


def _opened(request: SearchRequest) -> tuple[SearchRequest, ...]:
    """The requests in which the search decides on layers: with weights gathered as they are, and in fp8 if possible.
    The lower bound of the two is the bound of all."""
    gathered = gathering_in_fp8(request)
    return (request,) if gathered is None else (request, gathered)


def _least_work(request: SearchRequest) -> float:
    """A lower bound on the step time of all plans of a request that was not searched to its end."""
    try:
        with finishing():
            return least_work(request, Shared())
    except LimitError:
        return 0.0


def _seconds(plan: Ranked) -> float:
    return plan.seconds


def _fastest(plans: Sequence[Ranked]) -> tuple[Ranked, ...]:
    """Plans of different configurations, the fastest first."""
    of = dict[Configuration, Ranked]()
    for one in sorted(plans, key=lambda one: one.seconds):
        of.setdefault(one.configuration, one)
    return tuple(of.values())


def ends_of(request: SearchRequest) -> tuple[SearchRequest, ...]:
    """The requests with all layers in fp8, and with none."""
    fp8 = request.fp8
    every = replace(request, fp8_layers=ALL_LAYERS)
    if request.fp8_layers:  # some are to be in fp8
        return (every,)
    others = replace(fp8, left_out=ALL_LAYERS, experts=False, gathered=False) if fp8.dispatch else NO_FP8
    return (every, replace(request, fp8=others, fp8_layers=ALL_LAYERS))
