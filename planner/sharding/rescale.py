"""The same graph at another batch size, without tracing again.

The batch dim of the inputs is followed through the rules: a factor that indexes a scaled dim is scaled, and so is
every result dim that it indexes. A compound dim (b s) scales by its outermost factor. Where an operator needs two
different scales for one factor, or a scaled factor is blocked, the batch of this model cannot be changed and that is
said.
"""

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from planner.errors import RequestError
from planner.graph.operator_graph import Operator, OperatorGraph, TensorType
from planner.sharding.rule import Dims, FactorKind, Rule
from planner.sharding.rules import rule_of

Scales = tuple[Fraction, ...]


def rescale_batch(graph: OperatorGraph, batch: int, new_batch: int) -> OperatorGraph:
    """`graph` with the leading dim `batch` of its inputs changed to `new_batch`.

    Inputs whose leading dim is not `batch` keep their shape. Raises RequestError, naming the operator, where the
    batch cannot be changed.
    """
    if batch == new_batch:
        return graph
    scales: dict[str, Scales] = {
        name: tuple(
            Fraction(new_batch, batch) if dim == 0 and extent == batch and name in graph.inputs else Fraction(1)
            for dim, extent in enumerate(tensor.shape)
        )
        for name, tensor in graph.types.items()
        if name not in graph.producer
    }
    for op in graph.operators:
        _propagate(graph, op, scales)
    types = {name: _scaled(name, tensor, scales[name]) for name, tensor in graph.types.items()}
    operators = tuple(_respelled(op, rule_of(graph, op), types) for op in graph.operators)
    return replace(graph, types=types, operators=operators)


def _propagate(graph: OperatorGraph, op: Operator, scales: dict[str, Scales]) -> None:
    rule = rule_of(graph, op)
    factors: dict[int, Fraction] = {}
    for name, dims in zip(op.operands, rule.operands, strict=True):
        for scale, indexed in zip(scales[name], dims, strict=True):
            for position, factor in enumerate(indexed):
                wanted = scale if position == 0 else Fraction(1)
                if factors.setdefault(factor, wanted) != wanted:
                    raise RequestError(
                        f"the batch cannot be changed: {op.name} would need two scales for factor"
                        f" '{rule.factors[factor].name}'"
                    )
    for factor, scale in factors.items():
        if scale != 1 and rule.factors[factor].kind is FactorKind.BLOCKED:
            raise RequestError(
                f"the batch cannot be changed: {op.name} depends on the extent of its dim '{rule.factors[factor].name}'"
            )
    for result, dims in zip((r for r in op.results if r is not None), rule.results, strict=True):
        scales[result] = _result_scales(dims, factors)


def _result_scales(dims: Dims, factors: Mapping[int, Fraction]) -> Scales:
    scales = []
    for indexed in dims:
        scale = Fraction(1)
        for factor in indexed:
            scale *= factors.get(factor, Fraction(1))
        scales.append(scale)
    return tuple(scales)


def _scaled(name: str, tensor: TensorType, scales: Scales) -> TensorType:
    shape = tuple(extent * scale for extent, scale in zip(tensor.shape, scales, strict=True))
    if any(extent.denominator != 1 for extent in shape):
        raise RequestError(
            f"the batch cannot be changed: {name} of shape {tensor.shape} would get the shape"
            f" ({', '.join(map(str, shape))})"
        )
    return replace(tensor, shape=tuple(int(extent) for extent in shape))


def _respelled(op: Operator, rule: Rule, types: Mapping[str, TensorType]) -> Operator:
    """An operator that spells out its result's shape spells out the new one."""
    result = op.results[0]
    if rule.local_form is None or result is None or len(op.arguments) != 2 or not isinstance(op.arguments[1], tuple):
        return op
    return replace(op, arguments=(op.arguments[0], types[result].shape))
