"""Whether weights that hold several matrices are whole or apart (`planner.graph.rewriting.fused_weights`).

    whole   one product, fewer launches; what it makes is gathered where it is cut
    apart   tensor parallelism divides each matrix

The model is searched apart first. Where the best plan cuts none of these products by their outputs, the weights may as
well be whole, and it is searched again so; the better plan is taken.
"""

from collections.abc import Callable
from dataclasses import replace

from planner.errors import InfeasibleError, LimitError, RequestError
from planner.graph.operator_graph import OperatorGraph
from planner.graph.rewriting.fused_weights import with_fused_weights_apart
from planner.limits import sharing
from planner.plan.carried import graph_text
from planner.plan.outline import outline
from planner.plan.plan import Plan
from planner.sharding.rules import rule_of
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.result import SearchResult


def best_of_parts(
    request: SearchRequest, solve: Callable[[SearchRequest], SearchResult], score: Callable[[SearchResult], float]
) -> SearchResult:
    """The better of `solve` with weights apart and whole. It counts as stopped if either search was.

    Raises what `solve` raises for whole weights, if it raises something for both.
    """
    apart = with_fused_weights_apart(request.graph)
    if apart is request.graph:
        return solve(request)
    first: SearchResult | None = None
    late = False
    try:
        with sharing(2):
            first = solve(_with_graph(request, apart))
        if cuts_parts(first.plan, apart):
            return first
        late = first.statistics.stopped
    except (InfeasibleError, RequestError) as error:
        late = isinstance(error, LimitError)
    try:
        second = solve(request)
    except (InfeasibleError, RequestError):
        if first is None:
            raise
        return first
    best = second if first is None else min(second, first, key=score)
    return best.cut_short() if late else best


def cuts_parts(plan: Plan, graph: OperatorGraph) -> bool:
    """Whether a plan cuts a product with a part of a weight by its outputs."""
    sizes = plan.mesh.sizes
    strategies = {name: strategy for group in plan.groups for name, strategy in group.operators}
    for name in graph.cuts:
        for at in graph.consumers[name]:
            op = graph.operators[at]
            rule = rule_of(graph, op)
            outputs = {rule.factors[factor].name for factor in rule.results[0][-1]}
            strategy = strategies.get(op.name, ())
            if any(choice in outputs and size > 1 for choice, size in zip(strategy, sizes, strict=False)):
                return True
    return False


def _with_graph(request: SearchRequest, graph: OperatorGraph) -> SearchRequest:
    known = request.model
    text = known.graph and graph_text(graph, batch=request.batch, sequence_length=known.sequence_length)
    model = replace(known, fingerprint=graph.fingerprint(), outline=outline(graph), graph=text)
    return replace(request, graph=graph, model=model)
