"""Rules of what picks elements by numbers that stand in a tensor: bags of rows, indexing."""

from dataclasses import dataclass
from typing import final

from planner.errors import RuleError
from planner.graph.call import Call
from planner.graph.operator_graph import TensorType
from planner.sharding.rule import Dims, FactorKind, Rule, Work
from planner.sharding.rules.spec import FactorTable, RuleSpec, broadcast_dims, dims_of, normal_dim

_MAX = 2  # torch's number for bags whose largest element counts; 0 are sums, 1 averages


@final
@dataclass(frozen=True, kw_only=True)
class EmbeddingBag(RuleSpec):
    """`v h, b k -> b h`: rows of a table, by the numbers in each of b bags, summed or averaged.

    Rows v are a reduction, as in a lookup: each device adds up those that it has. The largest element of a bag is no
    sum: there v is blocked. Bags of different lengths stand one after the other, `v h, k, b -> b h`, and neither they
    nor the numbers can be cut evenly.
    """

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        weight, numbers = call.operands[0].shape, call.operands[1].shape
        largest = dict(call.keywords).get("mode", 0) == _MAX
        v = _factor(table, "v", weight[0], FactorKind.BLOCKED if largest else FactorKind.REDUCTION)
        h = _factor(table, "h", weight[1], FactorKind.PARALLEL)
        uneven = len(call.arguments) > 2
        bags = _factor(table, "b", call.results[0].shape[0], FactorKind.BLOCKED if uneven else FactorKind.PARALLEL)
        k = _factor(table, "k", numbers[-1], FactorKind.BLOCKED)
        held: Dims = (k,) if uneven else (bags, k)
        offsets = dims_of(table, call.operands[2].shape, FactorKind.BLOCKED, "offset") if uneven else ()
        beside: tuple[Dims, ...] = (held, offsets) if uneven else (held,)
        weighted: tuple[Dims, ...] = (held,) if len(call.operands) > len(beside) + 1 else ()
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=((v, h), *beside, *weighted),
            results=((bags, h),),
            op_class="embedding",
            work=(Work(coefficient=1.0, factors=(*h, *(f for dim in held for f in dim))),),
            looked_up=(0,),
            saves=tuple((operand, (0, *range(2 + uneven, 3 + uneven))) for operand in range(1, 2 + uneven)),
        )


@final
@dataclass(frozen=True, kw_only=True)
class Index(RuleSpec):
    """`x[:, i, j]`: tensors of numbers, broadcast to each other, pick along some dims, which are blocked; other dims
    pass through. What the numbers index in the result is parallel.

    The picked dims come where the first of them was, or first of all where others lie between them.
    """

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        source, picking = call.operands[0].shape, call.argument(1, "indices")
        given = list(picking) if isinstance(picking, tuple) else []
        at = [dim for dim, tensor in enumerate(given) if isinstance(tensor, TensorType)]
        if not at or any(tensor.dtype in ("bool", "uint8") for tensor in call.operands[1:]):
            raise RuleError(f"{call.op}: picking by a mask has a result whose shape depends on it; use numbers")
        first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
        count = len(call.results[0].shape) - (len(source) - len(at))
        shape = call.results[0].shape[first : first + count]
        picked = dims_of(table, shape, prefix="i")
        dims: Dims = tuple(
            _factor(table, f"d{dim}", extent, FactorKind.BLOCKED if dim in at else FactorKind.PARALLEL)
            for dim, extent in enumerate(source)
        )
        passing = [dims[dim] for dim in range(len(source)) if dim not in at]
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=(dims, *(broadcast_dims(picked, shape, t.shape, call.op) for t in call.operands[1:])),
            results=((*passing[:first], *picked, *passing[first:]),),
            op_class="copy",
            saves=tuple((operand, (0,)) for operand in range(1, len(call.operands))),
        )


@final
@dataclass(frozen=True, kw_only=True)
class IndexSelect(RuleSpec):
    """Numbers pick along one dim, which is blocked; what they index in the result is parallel."""

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        source = call.operands[0].shape
        dim = normal_dim(call.integer(1, "dim", 0), len(source))
        picked = _factor(table, "i", call.results[0].shape[dim], FactorKind.PARALLEL)
        dims: Dims = tuple(
            _factor(table, f"d{at}", extent, FactorKind.BLOCKED if at == dim else FactorKind.PARALLEL)
            for at, extent in enumerate(source)
        )
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=(dims, (picked,) if call.operands[1].shape else ()),
            results=((*dims[:dim], picked, *dims[dim + 1 :]),),
            op_class="copy",
            saves=((1, (0,)),),
        )


def _factor(table: FactorTable, name: str, extent: int, kind: FactorKind) -> tuple[int, ...]:
    return (table.add(name, extent, kind),) if extent != 1 else ()
