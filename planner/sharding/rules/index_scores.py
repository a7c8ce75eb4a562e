"""The rule of the scores of an indexer (`planner.graph.operators.index_scores`).

    b s h d, b t d, b s h -> b s t

Samples, queries and keys are independent of each other; heads are summed over, behind relu, so each device may have
some of them. The elements d of a head are whole on every device. Nothing but the operands is kept; the backward pass
computes the forward pass again.
"""

from dataclasses import dataclass, replace
from typing import final

from planner.graph.call import Call
from planner.graph.rewriting.indexers import BLOCK
from planner.sharding.rule import Rule, Work
from planner.sharding.rules.einsum import WIDE, Einsum
from planner.sharding.rules.recomputed import keeping_operands
from planner.sharding.rules.spec import RuleSpec

_LIVING = 3.0
"""Tensors of the scores of heads of a block that live together."""


@final
@dataclass(frozen=True, kw_only=True)
class IndexScores(RuleSpec):
    """Queries of heads, keys, and weights of heads."""

    def build(self, call: Call) -> Rule:
        rule = Einsum(
            pattern="b s h d, b t d, b s h -> b s t",
            op_class="index_scores",
            positions=(0, 1, 2),
            blocked="d",
            work=((2.0, "b s h t d"),),
            roles=(("batch", "b"), ("queries", "s"), ("heads", "h"), ("depth", "d"), ("keys", "t")),
        ).build(call)
        scores = tuple(rule.index[name] for name in "bsht" if name in rule.index)
        few = rule.whole_extent(scores) <= BLOCK
        block = Work(coefficient=_LIVING * WIDE * (1 if few else BLOCK), factors=scores if few else ())
        kept = keeping_operands(rule, ((float(WIDE), "b t d"),))
        return replace(kept, scratch=(*kept.scratch, block))
