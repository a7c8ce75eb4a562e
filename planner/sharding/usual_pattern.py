"""The pattern by which training engines cut operators over tensor parallel devices (Shoeybi et al. 2019, Megatron-LM):

rows      a weight whose data come from another product or from attention, with only operators without weights between
columns   every other weight of a product
words     the vocabulary of an embedding of the samples' tokens, and columns of the head
"""

from collections.abc import Sequence

from planner.graph.operator_graph import OperatorGraph
from planner.sharding.labels import factor_labels
from planner.sharding.rule import Rule
from planner.sharding.rules import rule_of

_ENDS = frozenset({"matmul", "attention", "embedding", "experts"})  # where data begin that are cut one way


def usual_factors(
    graph: OperatorGraph, *, vocabulary: bool, among: Sequence[bool] | None = None
) -> tuple[int | None, ...]:
    """For each operator the factor that tensor parallel devices cut; None where the pattern says nothing, and for
    operators that are not in `among`."""
    labels = factor_labels(graph)
    return tuple(
        _usual_factor(graph, at, rule_of(graph, op), labels[at], vocabulary) if among is None or among[at] else None
        for at, op in enumerate(graph.operators)
    )


def _usual_factor(graph: OperatorGraph, at: int, rule: Rule, labels: tuple[str, ...], vocabulary: bool) -> int | None:
    """The factor that tensor parallel devices split; None where the pattern says nothing."""
    op = graph.operators[at]
    weight = next((i for i, name in enumerate(op.operands) if name in graph.parameter_names), None)
    if weight is None or rule.op_class not in ("matmul", "embedding") or "batch" not in labels:
        return None
    factors = {factor for dims in rule.operands[weight] for factor in dims}
    results = {factor for dims in rule.results[0] for factor in dims}
    inner, outer = factors - results, factors & results
    if rule.op_class == "embedding":
        return next(iter(inner)) if vocabulary and len(inner) == 1 else None
    wanted = inner if _follows_a_product(graph, at, weight) else outer
    return next(iter(wanted)) if len(wanted) == 1 else None


def _follows_a_product(graph: OperatorGraph, at: int, weight: int) -> bool:
    """Whether the data of a product come from another product, or from attention, with no norm in between."""
    op = graph.operators[at]
    open_names = [name for i, name in enumerate(op.operands) if i != weight]
    seen: set[int] = set()
    while open_names:
        producer = graph.producer.get(open_names.pop())
        if producer is None or producer in seen:
            continue
        seen.add(producer)
        before = graph.operators[producer]
        op_class = rule_of(graph, before).op_class
        if op_class in _ENDS:
            if op_class in ("matmul", "attention"):
                return True
        elif op_class != "normalisation":
            open_names += before.operands
    return False
