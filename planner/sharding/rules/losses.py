"""Rules of losses that compare two tensors element by element, and sum or average the elements of the loss."""

from dataclasses import dataclass, replace
from typing import final

from planner.graph.call import Call
from planner.sharding.rule import FactorKind, Rule, Work
from planner.sharding.rules.einsum import WIDE, Einsum
from planner.sharding.rules.spec import FactorTable, RuleSpec, Saves, broadcast_dims, dims_of, present

_NONE, _MEAN = 0, 1  # torch's numbers for the reductions of a loss


@final
@dataclass(frozen=True, kw_only=True)
class PairLoss(RuleSpec):
    """Input and target of one shape, further operands (weights) broadcast to it; every dim is a factor.

    `reduction` is the position of the argument that says whether the elements are kept (0), averaged (1) or summed (2).
    `saved_elements` is the number of tensors of the shape of the input that autograd keeps beside the operands, and
    `scratch` how many of them live only during the backward pass.
    """

    work: float = 4.0
    reduction: int = 2
    saves: Saves = ((0, (0, 1)), (1, (0, 1)))
    saved_elements: float = 0.0
    scratch: float = 0.0

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        shape = call.operands[0].shape
        reduction = call.integer(self.reduction, "reduction", _MEAN)
        whole = dims_of(table, shape, FactorKind.PARALLEL if reduction == _NONE else FactorKind.REDUCTION)
        everything = tuple(range(len(table.freeze())))
        element = call.operands[0].element_bytes
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=tuple(broadcast_dims(whole, shape, operand.shape, call.op) for operand in call.operands),
            results=(whole if reduction == _NONE else (),),
            op_class="elementwise",
            work=(Work(coefficient=self.work, factors=everything),),
            saves=present(self.saves, len(call.operands)),
            saved_extra=(Work(coefficient=element * self.saved_elements, factors=everything),)
            if self.saved_elements
            else (),
            scratch=(Work(coefficient=element * self.scratch, factors=everything),) if self.scratch else (),
            mean_over=everything if reduction == _MEAN else (),
        )


@final
@dataclass(frozen=True, kw_only=True)
class Ctc(RuleSpec):
    """The CTC loss (`planner.graph.operators.ctc`): `t n c, n s, n, n -> n`. Samples are independent of each other.

    The sum over alignments takes three sums for each step and each of 2 s + 1 labels, in float32 at least; the backward
    pass computes those sums again, and those from the other end.
    """

    def build(self, call: Call) -> Rule:
        rule = Einsum(
            pattern="t n c, n s, n, n -> n",
            op_class="elementwise",
            blocked="t c s",
            work=((10.0, "t n s"),),
            repeated_work=2.0,
            saves=tuple((operand, (0,)) for operand in range(4)),
        ).build(call)
        width = 2 * max(WIDE, call.operands[0].element_bytes)
        terms = ((2.0 * width, "t n s"), (width, "t n"))
        return replace(
            rule,
            scratch=tuple(
                Work(coefficient=each, factors=tuple(rule.index[one] for one in names.split() if one in rule.index))
                for each, names in terms
            ),
        )
