"""Rules of operators that pick elements by numbers that are data: indexing with tensors, gather, index_select, and
scatter of one number.

The dims that are looked into are whole on every device, as any number may be asked for. The numbers, and with them the
result, are cut freely. Where a source is cut along its other dims, each device looks into its piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from planner.errors import RuleError
from planner.graph.call import Call
from planner.graph.operator_graph import TensorType
from planner.sharding.rule import Dims, FactorKind, Rule, Work
from planner.sharding.rules.spec import FactorTable, RuleSpec, broadcast_dims, normal_dim


@final
@dataclass(frozen=True, kw_only=True)
class Index(RuleSpec):
    """`x[i, :, j]`: numbers at position 1, a list with None for dims that are taken whole; they are broadcast together.

    Their dims stand in the result in the place of the first of them, or in front where a whole dim lies between two.
    """

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        source, numbers = call.operands[0], call.argument(1, "indices")
        if not isinstance(numbers, tuple) or any(_is_mask(index) for index in numbers):
            raise RuleError(
                f"{call.op}: boolean indices pick a number of elements that depends on data; use torch.where"
            )
        looked = [dim for dim, index in enumerate(numbers) if index is not None]
        whole = [dim for dim in range(len(source.shape)) if dim not in looked]
        first = looked[0] if looked == list(range(looked[0], looked[-1] + 1)) else 0
        rank = len(call.results[0].shape) - len(whole)
        shape = call.results[0].shape[first : first + rank]
        made = tuple((table.add(f"i{at}", extent),) if extent != 1 else () for at, extent in enumerate(shape))
        read = _source_dims(table, source, looked)
        passing = [read[dim] for dim in whole]
        return _lookup(
            call,
            table,
            operands=(read, *(broadcast_dims(made, shape, index.shape, call.op) for index in call.operands[1:])),
            result=(*passing[:first], *made, *passing[first:]),
        )


def _is_mask(index: object) -> bool:
    return isinstance(index, TensorType) and index.dtype in ("bool", "uint8")


@final
@dataclass(frozen=True, kw_only=True)
class IndexSelect(RuleSpec):
    """Rows of a dim (position 1) by a list of numbers (position 2)."""

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        source = call.operands[0]
        dim = normal_dim(call.integer(1, "dim", 0), len(source.shape))
        read = _source_dims(table, source, [dim])
        count = call.results[0].shape[dim]
        made = (table.add("i0", count),) if count != 1 else ()
        return _lookup(
            call,
            table,
            operands=(read, (made,)[: len(call.operands[1].shape)]),
            result=(*read[:dim], made, *read[dim + 1 :]),
        )


@final
@dataclass(frozen=True, kw_only=True)
class Gather(RuleSpec):
    """One element along a dim (position 1) for each number of a tensor of the shape of the result (position 2).

    Other dims pass where the source has the same extent as the numbers, and are blocked where it has more. Autograd
    keeps the source, too, though its gradient needs only the shape.
    """

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        source, shape = call.operands[0], call.results[0].shape
        dim = normal_dim(call.integer(1, "dim", 0), len(shape))
        cut = [at for at in range(len(shape)) if at != dim and source.shape[at] != shape[at]]
        made: list[tuple[int, ...]] = []
        for at, extent in enumerate(shape):
            kind = FactorKind.BLOCKED if at in cut else FactorKind.PARALLEL
            name = f"i{at}" if at == dim or at in cut else f"d{at}"
            made.append((table.add(name, extent, kind),) if extent != 1 else ())
        read = _source_dims(table, source, [dim, *cut])
        return _lookup(call, table, operands=(read, tuple(made)), result=tuple(made), kept=(0, 1))


@final
@dataclass(frozen=True, kw_only=True)
class ScatterValue(RuleSpec):
    """One number, written along a dim (position 1) to the places that a tensor says (position 2).

    That dim is whole, as are the places along it. Other dims pass where there are as many places as elements, and are
    blocked where there are fewer. Autograd keeps the places; they have no gradient.
    """

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        source, places = (operand.shape for operand in call.operands)
        dim = normal_dim(call.integer(1, "dim", 0), len(source))
        looked = [at for at in range(len(source)) if at == dim or source[at] != places[at]]
        written = _source_dims(table, call.operands[0], looked)
        said = tuple(
            written[at]
            if at not in looked
            else (table.add(f"i{at}", extent, FactorKind.BLOCKED),)
            if extent != 1
            else ()
            for at, extent in enumerate(places)
        )
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=(written, said),
            results=(written,),
            op_class="copy",
            work=(Work(coefficient=1.0, factors=tuple(factor for indexed in written for factor in indexed)),),
            saves=((1, (0,)),),
        )


def _source_dims(table: FactorTable, source: TensorType, looked: Sequence[int]) -> Dims:
    """One factor per dim of the source; those that are looked into are blocked, v0, v1, ..."""
    return tuple(
        ()
        if extent == 1
        else (table.add(f"v{dim}", extent, FactorKind.BLOCKED),)
        if dim in looked
        else (table.add(f"d{dim}", extent),)
        for dim, extent in enumerate(source.shape)
    )


def _lookup(
    call: Call, table: FactorTable, *, operands: tuple[Dims, ...], result: Dims, kept: Sequence[int] = ()
) -> Rule:
    """Autograd keeps the numbers, or the operands `kept`, for the gradient of the source."""
    made = tuple(factor for indexed in result for factor in indexed)
    return Rule(
        op=call.op,
        factors=table.freeze(),
        operands=operands,
        results=(result,),
        op_class="copy",
        work=(Work(coefficient=1.0, factors=made),),
        saves=tuple((index, (0,)) for index in kept or range(1, len(operands))),
        looked_up=(0,),
    )
