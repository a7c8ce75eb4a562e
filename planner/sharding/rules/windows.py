"""Attention under a mask that is known by its kind (`planner.graph.rewriting.masks`): the rule of attention without
one.

    b (g r) q d, b g k d, b g k e, b t, b t, (g r) -> b (g r) q e

No mask of queries x keys is made, so nothing is cut along the scores, and a ring may pass keys round. The numbers of
documents, and which keys are padding, are one number for each token: every device has those of all tokens of its
samples. Sinks are one number for each head, a cap of scores one number for all (`planner.models.composed_attention`).
Kernels cap the scores in registers (flash-attn 2.6, FlexAttention), in the time of products. Work counts the pairs that
a window shows; pairs that documents hide are not known, and are counted.
"""

from dataclasses import dataclass, replace
from typing import final

from planner.errors import RuleError
from planner.graph.call import Call
from planner.sharding.rule import Rule, Work
from planner.sharding.rules.einsum import WIDE, Einsum
from planner.sharding.rules.spec import RuleSpec
from planner.sharding.window import SCORES, Window

_LIVING = 4.0
"""Tensors of the scores of a block that live together."""


@final
@dataclass(frozen=True, kw_only=True)
class WindowedAttention(RuleSpec):
    """`plain` is the rule without any mask, with patterns for the numbers of documents and of seen keys."""

    plain: Einsum

    def build(self, call: Call) -> Rule:
        window = window_of(call)
        rule = self.plain.build(call)
        names = {factor.name: factor.extent for factor in rule.factors}
        queries, keys = names.get("q", 1), names.get("k", 1)
        seen = window.pairs(0, queries, keys) / (queries * keys)
        causal = window.ahead == 0
        element = max(call.operands[0].element_bytes, WIDE)
        scores = tuple(rule.index[name] for name in ("b", "g", "r", "q", "k") if name in rule.index)
        few = rule.whole_extent(scores) <= SCORES
        block = Work(coefficient=_LIVING * element * (1 if few else SCORES), factors=scores if few else ())
        sums = (tuple(factor for indexed in dims for factor in indexed) for dims in rule.operands[:3])
        return replace(
            rule,
            work=tuple(replace(term, coefficient=seen * term.coefficient) for term in rule.work),
            scratch=(*rule.scratch, block, *(Work(coefficient=float(element), factors=factors) for factors in sums)),
            causal=causal,
            window=window,
            seen=seen * (2.0 if causal else 1.0),
        )


def window_of(call: Call) -> Window:
    """What the arguments of a call say of positions. Raises RuleError where they say nothing that can be."""
    told = dict(call.keywords)
    back, ahead, prefix, chunk = told.get("back"), told.get("ahead"), told.get("prefix", 0), told.get("chunk")
    for name, number in (("back", back), ("ahead", ahead), ("prefix", prefix)):
        if not (number is None and name != "prefix") and (type(number) is not int or number < 0):
            raise RuleError(f"{call.op}: '{name}' is how many keys are seen, 0 or more; it is {number!r}")
    assert isinstance(back, int | None)
    assert isinstance(ahead, int | None)
    assert isinstance(prefix, int)
    if chunk is not None and (type(chunk) is not int or chunk < 1 or prefix):
        raise RuleError(
            f"{call.op}: 'chunk' is how many positions a chunk has, 1 or more, without a prefix; it is {chunk!r}"
        )
    assert isinstance(chunk, int | None)
    return Window(back=back, ahead=ahead, prefix=prefix, chunk=chunk)
