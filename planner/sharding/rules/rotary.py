"""The rule of rotary position embeddings (`planner.graph.operators.rotary`).

    .. h, .. angles, .. angles -> .. h

All dims but the last are independent; tables are broadcast to them. Heads are whole, because pairs of their elements
are rotated. Autograd keeps only the tables. PyTorch runs it in passes over memory, counted here by what each pass reads
and writes, u the bytes that are rotated and t those of a table:

    each angle twice    neg u, two products 2 u + t each, sum 3 u, join 2 u         10 u + 2 t, 5 operators
    each angle once     four products u + t each, two sums 1.5 u each, join 2 u      9 u + 4 t, 7 operators

Halves of neighbours are a copy before, with each angle twice. Elements that are not rotated are joined to the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from planner.errors import RuleError
from planner.graph.call import Call
from planner.graph.operator_graph import TensorType
from planner.sharding.rule import Composed, Dims, FactorKind, Rule, Work
from planner.sharding.rules.spec import FactorTable, RuleSpec, broadcast_dims, dims_of

_WORK = {False: (3.5, 4.5), True: (3.0, 4.0)}
"""Operations of an element, forward and backward, by whether tables have each angle once: a negation of half of them,
products, and a sum, of which either operand has a gradient."""
_LIVING = 2.0
"""Tensors of the shape that is rotated that live together in either pass, beside operands, results and gradients."""


@final
@dataclass(frozen=True, kw_only=True)
class Rotary(RuleSpec):
    """The tensor to rotate, cosines and sines, and how to rotate (`planner.graph.operators.rotary.rotary`)."""

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        x, *tables = call.operands
        *lead, width = x.shape
        size, once, heads = call.integer(6, "size", width), bool(call.argument(7, "once")), call.argument(8, "heads")
        angles = tables[0].shape[-1]
        if angles < size // 2 or (angles != size and not once):
            raise RuleError(f"{call.op}: tables of {angles} angles turn no {size} elements")
        own, head = dims_of(table, lead), table.add_unless_one("h", width, FactorKind.BLOCKED)
        each = head if angles == width else table.add_unless_one("angles", angles, FactorKind.BLOCKED)
        read = [at for at in range(len(lead)) if at != heads]
        kept, shape = tuple(own[at] for at in read), [lead[at] for at in read]
        of_tables = [(*broadcast_dims(kept, shape, one.shape[:-1], call.op), each) for one in tables]
        turned, share = _bytes((*own, each), x, size / angles), size / 2 / angles if once else 1.0
        ahead, back = _WORK[once]
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=((*own, head), *of_tables),
            results=((*own, head),),
            op_class="elementwise",
            work=(Work(coefficient=ahead * size / angles, factors=turned.factors),),
            gradient_work=back / ahead,
            saves=((1, (0,)), (2, (0,))),
            scratch=(_times(_LIVING, turned),),
            pointwise=size == width and not once,
            composed=_composed(
                turned,
                [_bytes(dims, one, share) for dims, one in zip(of_tables, tables, strict=True)],
                twice=not once,
                parted=bool(call.argument(3, "from_pairs")) and not call.argument(4, "to_pairs"),
                around=None if size == width else _bytes((*own, head), x),
            ),
        )


def _bytes(dims: Dims, tensor: TensorType, times: float = 1.0) -> Work:
    return Work(coefficient=times * tensor.element_bytes, factors=tuple(factor for own in dims for factor in own))


def _times(count: float, term: Work) -> Work:
    return replace(term, coefficient=count * term.coefficient)


def _composed(
    turned: Work, tables: Sequence[Work], *, twice: bool, parted: bool, around: Work | None
) -> tuple[Composed, ...]:
    """The passes over the rotated tensor and over tables: products, sums and negations, and copies. Backward, each pass
    reads its operands and the gradient of its result, and writes the gradients of its operands."""

    def copy(term: Work, operators: tuple[int, int]) -> Composed:
        moved, back = (_times(2.0, term),), (_times(3.0, term),)
        return Composed(op_class="copy", operators=operators, moved=moved, moved_backward=back)

    ahead, back, products = (8.0, 12.5, 1.0) if twice else (7.0, 11.0, 2.0)
    read = tuple(_times(products, term) for term in tables)
    worked = Composed(
        op_class="elementwise",
        operators=(4, 5) if twice else (6, 8),
        moved=(_times(ahead, turned), *read),
        moved_backward=(_times(back, turned), *read),
    )
    before = [copy(turned, (1, 1))] if twice and parted else []
    behind = [copy(around, (1, 2))] if around is not None else []
    return worked, copy(turned, (1, 2)), *before, *behind
