"""The rule of a norm that is multiplied with a gate (`planner.graph.rewriting.gated_norm`).

    .. h, .. h, h -> .. h

All dims but the last are independent. Nothing but the operands is kept; the backward pass computes the rest again.
"""

from dataclasses import dataclass
from typing import final

from planner.graph.call import Call
from planner.sharding.rule import Rule
from planner.sharding.rules.einsum import WIDE, Einsum
from planner.sharding.rules.recomputed import keeping_operands
from planner.sharding.rules.spec import RuleSpec, leading_names

_WORK = 11.0
"""Operations of an element: 6 of the norm, 4 of the activation, the product."""
_LIVING = 8.0
"""Tensors in float32 at least that live together in the backward pass."""


@final
@dataclass(frozen=True, kw_only=True)
class GatedNorm(RuleSpec):
    """The operand that is normalised, the gate, and a number for each element of the last dim, or None."""

    def build(self, call: Call) -> Rule:
        lead = leading_names(len(call.operands[0].shape) - 1)
        every = " ".join((*lead, "h"))
        rule = Einsum(
            pattern=f"{every}, {every}, h -> {every}",
            op_class="normalisation",
            positions=(0, 1, 2),
            blocked="h",
            work=((_WORK, every),),
        ).build(call)
        return keeping_operands(rule, ((_LIVING * max(WIDE, call.operands[0].element_bytes), every),), ())
