"""The same graph at another batch size, without tracing again.

The batch dim of the inputs is followed through the rules: a factor that indexes a growing dim grows, and so does
every result dim that it indexes. In a compound dim (s b) it is known how many steps of other loops, here s, are
outside of the loop that grows. Where an operator would need two different growths for one factor, where the batch
meets a blocked factor, or where it is 1 and cannot be told from a dim that is broadcast, the batch of this model
cannot be changed and that is said. Not seen is a batch size that the model's Python code computes with (`x /
x.shape[0]`), but for one that an operator spreads a tensor over (a class token, `token.expand(x.shape[0], -1, -1)`):
where what it makes meets the batch, and would have to grow to fit, it does.

    token ─> expand (2 by the code) ─> cat <─ patches (batch grows)       the 2 is the batch: expand anew
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from planner.errors import RequestError
from planner.graph.operator_graph import Argument, Operator, OperatorGraph, TensorType
from planner.sharding.rule import FactorKind, Rule
from planner.sharding.rules import rule_of


@dataclass(frozen=True, slots=True)
class Growth:
    """What happens to a dim or factor: a loop in it, with `outer` steps of others outside, takes `scale` times its
    steps."""

    scale: Fraction = Fraction(1)
    outer: int = 1


_STILL = Growth()


def rescale_batch(graph: OperatorGraph, batch: int, new_batch: int) -> OperatorGraph:
    """`graph` with the leading dim `batch` of its inputs changed to `new_batch`.

    Inputs whose leading dim is not `batch` keep their shape. Raises RequestError, naming the operator, where the
    batch cannot be changed.
    """
    if batch == new_batch:
        return graph
    grown = Growth(scale=Fraction(new_batch, batch))
    growths: dict[str, tuple[Growth, ...]] = {
        name: tuple(
            grown if dim == 0 and extent == batch and name in graph.inputs else _STILL
            for dim, extent in enumerate(tensor.shape)
        )
        for name, tensor in graph.types.items()
        if name not in graph.producer
    }
    growths = _followed(graph, growths, grown, batch)
    types = {name: _grown(name, tensor, growths[name]) for name, tensor in graph.types.items()}
    operators = tuple(_respelled(op, rule_of(graph, op), types) for op in graph.operators)
    return replace(graph, types=types, operators=operators)


class _ClashError(Exception):
    """An operator would need two scales for one factor; `operands` are those of its operands that do not grow."""

    def __init__(self, why: str, operands: tuple[str, ...]) -> None:
        super().__init__(why)
        self.operands = operands


def _followed(
    graph: OperatorGraph, given: Mapping[str, tuple[Growth, ...]], grown: Growth, batch: int
) -> dict[str, tuple[Growth, ...]]:
    """Growth of every value. Each clash makes one more operator spread its tensor over the batch, or is an error."""
    spread: dict[str, int] = {}  # by the name of the operator the factor that it adds
    while True:
        growths = dict(given)
        try:
            for op in graph.operators:
                _propagate(rule_of(graph, op), op, growths, {spread[op.name]: grown} if op.name in spread else {})
        except _ClashError as clash:
            more = _spreading(graph, clash.operands, batch, spread)
            if not more:
                raise _refusal(str(clash)) from None
            spread.update(more)
        else:
            return growths


def _spreading(graph: OperatorGraph, names: tuple[str, ...], batch: int, known: Mapping[str, int]) -> dict[str, int]:
    """Operators upstream of values that spread a tensor over a new dim of the extent of the batch, and its factor."""
    waiting, seen, found = list(names), set(names), {}
    while waiting:
        at = graph.producer.get(waiting.pop())
        if at is None:
            continue
        op = graph.operators[at]
        rule = rule_of(graph, op)
        added = [dim[0] for dim in rule.results[0] if dim and not any(dim in dims for dims in rule.operands)]
        added = [factor for factor in added if rule.factors[factor].extent == batch]
        if rule.local_form == "expand" and added and op.name not in known:
            found[op.name] = added[0]
        waiting += [name for name in op.operands if name not in seen]
        seen.update(op.operands)
    return found


def _propagate(rule: Rule, op: Operator, growths: dict[str, tuple[Growth, ...]], spread: Mapping[int, Growth]) -> None:
    """Growth of the results of an operator from that of its operands, and of factors that it spreads a tensor over."""
    factors = dict(spread)
    for name, dims in zip(op.operands, rule.operands, strict=True):
        for growth, indexed in zip(growths[name], dims, strict=True):
            for factor, wanted in _of_factors(rule, op, indexed, growth):
                if factors.setdefault(factor, wanted) != wanted:
                    still = tuple(name for name in op.operands if all(g == _STILL for g in growths[name]))
                    raise _ClashError(
                        f"{op.name} would need two scales for factor '{rule.factors[factor].name}'", still
                    )
    for factor, growth in factors.items():
        if growth != _STILL and rule.factors[factor].kind is FactorKind.BLOCKED:
            raise _refusal(f"{op.name} depends on the extent of its dim '{rule.factors[factor].name}'")
    for result, dims in zip((r for r in op.results if r is not None), rule.results, strict=True):
        growths[result] = tuple(_of_dim(rule, op, indexed, factors) for indexed in dims)


def _of_factors(rule: Rule, op: Operator, indexed: tuple[int, ...], growth: Growth) -> Iterator[tuple[int, Growth]]:
    """Which of the factors of a dim grows."""
    outside = 1
    found = growth == _STILL
    for factor in indexed:
        extent = rule.factors[factor].extent
        here = not found and growth.outer % outside == 0 and outside <= growth.outer < outside * extent
        yield factor, Growth(growth.scale, growth.outer // outside) if here else _STILL
        found = found or here
        outside *= extent
    if not found:
        raise _refusal(
            f"{op.name} cannot tell it from a dim of extent 1; give example inputs with a batch of 2 or more"
        )


def _of_dim(rule: Rule, op: Operator, indexed: tuple[int, ...], factors: Mapping[int, Growth]) -> Growth:
    outside, found = 1, _STILL
    for factor in indexed:
        growth = factors.get(factor, _STILL)
        if growth != _STILL:
            if found != _STILL:
                raise _refusal(f"{op.name} puts two dims that depend on it into one")
            found = Growth(growth.scale, outside * growth.outer)
        outside *= rule.factors[factor].extent
    return found


def _refusal(why: str) -> RequestError:
    return RequestError(f"the batch cannot be changed: {why}")


def _grown(name: str, tensor: TensorType, growths: tuple[Growth, ...]) -> TensorType:
    shape = tuple(extent * growth.scale for extent, growth in zip(tensor.shape, growths, strict=True))
    if any(extent.denominator != 1 for extent in shape):
        raise _refusal(f"{name} of shape {tensor.shape} would get the shape ({', '.join(map(str, shape))})")
    return replace(tensor, shape=tuple(int(extent) for extent in shape))


def _respelled(op: Operator, rule: Rule, types: Mapping[str, TensorType]) -> Operator:
    """An operator that spells out its result's shape, or part of it from a dim on, spells out the new one."""
    result = op.results[0]
    *before, sizes = op.arguments
    if rule.local_form is None or result is None or not isinstance(sizes, tuple):
        return op
    start = before[1] if len(before) > 1 else 0
    assert isinstance(start, int)
    shape = types[result].shape
    first = start if start >= 0 else start + len(shape) - len(sizes) + 1
    spelled: tuple[Argument, ...] = tuple(
        size if size == -1 else extent for size, extent in zip(sizes, shape[first : first + len(sizes)], strict=True)
    )
    return replace(op, arguments=(*before, spelled))
