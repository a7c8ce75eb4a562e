"""Attention with sinks, or capped scores, under a mask of which only its numbers are known
(`planner.models.composed_attention`).

    b (g r) q d, b g k d, b g k e, [(g r)], [b] [(g r)] [q] [k] -> b (g r) q e

The full scores of queries x keys are computed, in float32 at least, in the forward pass and again in the backward pass;
nothing of them is kept. A mask is cut where the scores are cut; where the mask has an extent of 1, its gradient is a
sum (`planner.sharding.rules.masked`).
"""

from dataclasses import dataclass, replace
from typing import final

from planner.graph.call import Call
from planner.sharding.rule import Rule, Work
from planner.sharding.rules.einsum import WIDE, Einsum
from planner.sharding.rules.masked import dims_of_mask, dims_of_scores, without_mask
from planner.sharding.rules.spec import RuleSpec

_MASK = 4
_LIVING = 3.0
"""Tensors of scores that live together: scores, scores with the sink, and their softmax; backward two gradients
more."""


@final
@dataclass(frozen=True, kw_only=True)
class ComposedAttention(RuleSpec):
    """`plain` is the rule without a mask."""

    plain: Einsum

    def build(self, call: Call) -> Rule:
        rule = self.plain.build(without_mask(call, _MASK, "mask"))
        factors = tuple(factor for indexed in dims_of_scores(rule) for factor in indexed)
        living = Work(coefficient=_LIVING * max(call.operands[0].element_bytes, WIDE), factors=factors)
        rule = replace(rule, unfused=True, scratch=(*rule.scratch, living))
        if len(call.operands) == len(rule.operands):
            return rule
        last = len(rule.operands)
        return replace(
            rule,
            operands=(*rule.operands, dims_of_mask(rule, call, call.operands[last])),
            addends=(*rule.addends, last),
            saves=tuple((operand, tuple(range(last + 1))) for operand in range(last + 1)),
        )
