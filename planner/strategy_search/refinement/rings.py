"""Ring attention, or Ulysses inside a ring, around the best plan that has no ring.

    best plan    data 4 x tensor 2 x context 8, attention by heads (Ulysses)
    tried        context 8 as ring 2 x heads 4, 4 x 2, 8 x 1
                 and context 16 in all such ways, with half of the data or tensor devices, or of a pipeline that
                 nobody decided

A ring overlaps the transfer of keys and values with attention and needs no heads to divide. So it can win if a context
reaches over slow links, or has more devices than there are heads. On meshes of its own it would double the space and
seldom win. So it is searched only around the best plan if that splits sequences, with its micro-batches, without a
proof. Each set of degrees is a search with everything else free, cut off by the best plan so far. Unequal virtual
stages are tried only if the best plan has them. `--context-by auto` searches all of it.

If nothing fits without a ring, and there are fewer samples than devices, everything is searched with rings.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hardware_profiles import Seconds
from planner.errors import InfeasibleError, LimitError, RequestError
from planner.limits import ended_by
from planner.plan.layout.roles import roles
from planner.sharding.rule import FactorKind
from planner.sharding.rules import rule_of
from planner.strategy_search.engine.families import Shared
from planner.strategy_search.finalists.proofs import Ranked, with_proof
from planner.strategy_search.refinement.around import Listener, Stop, bound_of_like, exact, fastest_of, together, told
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.result import SearchResult
from planner.strategy_search.search import search

WORTH = 0.001
"""A plan with a ring is taken if its step is shorter by this share: a ring is one more thing to explain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Degrees:
    """Degrees of a plan whose sequences are split."""

    pipeline: int
    data: int
    tensor: int
    context: int

    def around(self, pinned: Pinned) -> "Iterator[_Degrees]":
        """These degrees, and those with twice the context degree and half of another degree that the user left open."""
        yield self
        for name in ("data", "tensor", "pipeline"):
            if getattr(pinned, name) is not None:
                continue
            degree = getattr(self, name)
            if degree % 2 == 0:
                yield replace(self, context=2 * self.context, **{name: degree // 2})


def with_rings(
    request: SearchRequest, solve: Callable[[SearchRequest], SearchResult], cancelled: Stop = lambda: False
) -> SearchResult:
    """`solve`, with rings everywhere if nothing fits without.

    Raises what `solve` raises if rings do not fit either, and LimitError if a limit of the planner is reached.
    """
    if not _left_open(request):
        return solve(request)
    try:
        return solve(request)
    except InfeasibleError as error:
        short = request.global_batch < request.cluster.devices
        if isinstance(error, LimitError) or cancelled() or not short:
            raise
        try:
            return solve(replace(request, pinned=replace(request.pinned, context_by="auto")))
        except LimitError:
            raise
        except (InfeasibleError, RequestError):
            raise error from None


def _left_open(request: SearchRequest) -> bool:
    """Whether axes are free, for plans of our own runtime or with its prices, and attention can use a ring."""
    pinned = request.pinned
    free = pinned.context_by is None and pinned.free and pinned.mesh is None and not request.certify
    decided = request.space or request.alternatives or request.shards or request.stores or request.default != "search"
    return free and exact(request) and not decided and _has_rings(request)


def _has_rings(request: SearchRequest) -> bool:
    rules = (rule_of(request.graph, op) for op in request.graph.operators if "attention" in op.op)
    return any(factor.kind is FactorKind.RING for rule in rules for factor in rule.factors)


def with_rings_around_best(
    request: SearchRequest,
    result: SearchResult,
    shared: Shared,
    on_progress: Listener,
    cancelled: Stop,
    limit: Seconds = math.inf,
) -> SearchResult:
    """The result, with a plan that has a ring first if that is faster. `shared` is that of the search. Plans that take
    `limit` or longer are of no interest."""
    if result.statistics.stopped or not _left_open(request):
        return result
    best = result.plans[0]
    words = roles(best.bound)
    if words.context == 1 or words.replicated > 1:
        return result
    degrees = _Degrees(pipeline=words.pipeline, data=words.data, tensor=words.tensor, context=words.context)
    found, statistics = None, result.statistics
    for one in degrees.around(request.pinned):
        if ended_by(cancelled):
            break
        with contextlib.suppress(InfeasibleError, RequestError):
            cutoff = min(limit, (found.plans[0] if found else best).bounded * (1 - WORTH))
            tried = search(
                _by_rings(request, one, best),
                told(on_progress, result, "trying ring attention"),
                cancelled,
                cutoff,
                shared,
                takes=lambda configuration: configuration.context[0] > 1,
                among=lambda configuration: best.configuration.uneven or not configuration.uneven,
            )
            statistics = together(statistics, tried.statistics)
            if tried.plans[0].bounded < cutoff:
                found = tried
    if found is None:
        return replace(result, statistics=statistics)
    try:
        first = tuple(
            with_proof(one, bound_of_like(one, result, request, shared), covered=False)
            for one in found.plans
            if one.bounded < best.bounded
        )
        plans = fastest_of((*first, *result.plans), request.top)
        bound = bound_of_like(plans[0], result, request, shared)
    except LimitError as error:
        return replace(result, statistics=statistics).cut_short(error.by)
    return replace(
        result,
        plans=plans,
        bound_seconds=bound,
        statistics=statistics,
        covered=False,
        contexts=found.contexts,
        close=(*found.close, *result.close),
        priced=(*found.priced, *result.priced),
    )


def _by_rings(request: SearchRequest, degrees: _Degrees, best: Ranked) -> SearchRequest:
    """The request with these degrees and the micro-batches of the best plan, with attention split in any way."""
    pinned = replace(
        request.pinned,
        context_by="auto",
        pipeline=degrees.pipeline,
        data=degrees.data,
        tensor=degrees.tensor,
        context=degrees.context,
        micro_batches=best.configuration.micro_batches,
    )
    return replace(request, pinned=pinned)
