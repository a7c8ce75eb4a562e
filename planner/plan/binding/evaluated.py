"""A bound plan for evaluating its model: the same operators in the same layouts, no dropout, and batch norm that uses
its running statistics without changing them."""

from planner.errors import RequestError, unknown_name
from planner.graph.forward_only import evaluating
from planner.graph.operator_graph import OperatorGraph
from planner.graph.rewriting.updates import UPDATE
from planner.plan.binding.bind import BoundPlan, bind_prepared
from planner.sharding.rules import rule_of

LOGITS = "logits"
"""The logits of a cross entropy, before views gave them another shape."""


def evaluated(bound: BoundPlan) -> BoundPlan:
    """The plan as its model is evaluated; the same object where that makes no difference."""
    whole = evaluating(bound.whole)
    return bound if whole is bound.whole else bind_prepared(bound.plan, whole, bound.blocks)


def idle_updates(bound: BoundPlan) -> frozenset[int]:
    """Operators that would make new contents of buffers; no buffer changes where nothing is trained."""
    contents = {content for _, content in bound.graph.updates}
    operators = enumerate(bound.graph.operators)
    return frozenset(at for at, op in operators if op.op == UPDATE and contents.isdisjoint(op.results))


def output_name(bound: BoundPlan, asked: str) -> str:
    """The name of the value in the graph that is asked for: by its name, or as "logits".

    Raises RequestError for a value that no operator makes.
    """
    graph = bound.graph
    name = _logits(graph) if asked == LOGITS and LOGITS not in graph.producer else asked
    if name not in graph.producer:
        raise RequestError(f"outputs: {unknown_name('value', asked, (LOGITS, *graph.producer))}")
    return name


def _logits(graph: OperatorGraph) -> str:
    """The first operand of the only cross entropy, where views of it begin."""
    losses = [op for op in graph.operators if rule_of(graph, op).op_class == "cross_entropy"]
    if len(losses) != 1:
        raise RequestError(
            f"outputs: the model has {len(losses)} cross entropies, so that it is not clear what its logits are; name"
            " values as plan show lists operators"
        )
    name = losses[0].operands[0]
    while name in graph.producer:
        op = graph.operators[graph.producer[name]]
        if rule_of(graph, op).op_class != "view" or not op.operands:
            break
        name = op.operands[0]
    return name
