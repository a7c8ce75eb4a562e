"""Linear layers in fp8: cut as all linear layers are; devices exchange maxima so that they use the same scales.

    y[t o] = sum_i x[t i] w[o i]      scales of a tensor   x  of all t i      w  of all o i     g = dy  of all t o
                                      scales of a row      x  of t, over i    w  of o, over i
                                      blocks of 128        x  of t, 128 of i  w  128 of o and of i
                                      lines of 32          x  of t, 32 of i   w  of o, 32 of i
      dx = g w        over o                               g  of t, over o    w  of i, over o
      dw = g' x       over t                               g  of o, over t    x  of i, over t

A scale is made from the largest element. Where an axis cuts the loops that a scale is over, the devices of the axis
take the maximum of theirs, four bytes for each scale. Nothing is sent for blocks that are whole on their devices; where
devices have parts of a block, they send their maxima of each block of the whole dim. Lines of 32 tokens lie in one
sample: tokens that follow each other along the last of their dims. Delayed scales are known before: devices agree on
them once a step (`planner.plan.layout.per_step_communication`). A weight may arrive cast (`Rule.narrow`): then it is
cast where it is stored, and nothing is sent for it here, as devices agree on its scales once a step.
"""

from dataclasses import dataclass, replace
from typing import final

from planner.fp8_recipes import BLOCK, LINE, Recipe
from planner.graph.call import Call
from planner.graph.fp8 import IN_FP8
from planner.sharding.rule import InnerCollective, Rule, Work
from planner.sharding.rules.spec import RuleSpec

_WEIGHT = 1
"""Its place among the operands."""
_SCALE = 4.0
"""Bytes of the largest element that a scale is made from: fp32."""


@final
@dataclass(frozen=True, kw_only=True)
class Fp8Linear(RuleSpec):
    """The rule of a linear layer, `plain`, under a recipe."""

    plain: RuleSpec
    recipe: Recipe

    def build(self, call: Call) -> Rule:
        rule = self.plain.build(call)
        given, weight = rule.operands[:2]
        tokens = tuple(factor for dim in given[:-1] for factor in dim)
        columns, depth = weight
        rate = self.recipe.rate
        of_weights = rate if self.recipe.weight_gradients else ""
        cast = ((*tokens, *depth), (*columns, *depth))
        narrow = (_WEIGHT,) if call.argument(3, IN_FP8, False) else ()
        return replace(
            rule,
            computed=(rate, rate, of_weights),
            gained=self.recipe.gained,
            scaled_in_blocks=self.recipe.block > 0,
            deferred_weight_gradients=(),
            narrow=narrow,
            scratch=tuple(Work(coefficient=1.0, factors=factors) for factors in (cast[:1] if narrow else cast)),
            inner=(
                *self._of_wholes(tokens, columns, depth, known=bool(narrow)),
                *self._of_blocks(rule, tokens, columns, depth, known=bool(narrow)),
                *self._of_lines(rule, tokens, columns, depth),
            ),
        )

    def _of_wholes(
        self, tokens: tuple[int, ...], columns: tuple[int, ...], depth: tuple[int, ...], *, known: bool
    ) -> tuple[InnerCollective, ...]:
        """The messages for scales of tensors, or of rows; none for scales of the weight that are `known`."""
        return tuple(
            InnerCollective(
                kind="all_reduce",
                factor=factor,
                factors=scales if self.recipe.scales != "tensor" else (),
                element_bytes=_SCALE,
                forward=int(not backward),
                backward=int(backward),
            )
            for over, scales, backward in self._maxima(tokens, columns, depth, known=known)
            for factor in over
        )

    def _of_lines(
        self, rule: Rule, tokens: tuple[int, ...], columns: tuple[int, ...], depth: tuple[int, ...]
    ) -> tuple[InnerCollective, ...]:
        """The messages for lines of which devices have parts: of both operands of each product, along its sum."""
        if self.recipe.scales != "line":
            return ()
        last, others = tokens[-1:], tokens[:-1]
        said = [(depth, tokens, 0), (depth, columns, 0), (columns, tokens, 1), (columns, depth, 1)]
        said += [(last, (*others, *columns), 1), (last, (*others, *depth), 1)]
        return tuple(
            InnerCollective(
                kind="all_reduce",
                factor=factor,
                factors=scales,
                element_bytes=_SCALE * -(-rule.whole_extent(over) // LINE),
                forward=1 - backward,
                backward=backward,
                blocks=LINE,
                ordered=over == last,
            )
            for over, scales, backward in said
            for factor in over
        )

    def _of_blocks(
        self, rule: Rule, tokens: tuple[int, ...], columns: tuple[int, ...], depth: tuple[int, ...], *, known: bool
    ) -> tuple[InnerCollective, ...]:
        """The messages for blocks of which devices have parts: blocks of the operands forward, of the gradient and the
        weight backward; none for a weight whose scales are `known`."""
        if self.recipe.scales != "block":
            return ()
        across, along = (-(-rule.whole_extent(factors) // BLOCK) for factors in (columns, depth))
        both, all_blocks = (*columns, *depth), across * along
        said: tuple[tuple[tuple[int, ...], tuple[int, ...], int, bool], ...] = (
            (depth, tokens, along, False),
            (columns, tokens, across, True),
            *(((both, (), all_blocks, False), (both, (), all_blocks, True)) if not known else ()),
        )
        return tuple(
            InnerCollective(
                kind="all_reduce",
                factor=factor,
                factors=scales,
                element_bytes=_SCALE * blocks,
                forward=int(not backward),
                backward=int(backward),
                blocks=BLOCK,
            )
            for over, scales, blocks, backward in said
            for factor in over
        )

    def _maxima(
        self, tokens: tuple[int, ...], columns: tuple[int, ...], depth: tuple[int, ...], *, known: bool
    ) -> list[tuple[tuple[int, ...], tuple[int, ...], bool]]:
        """The factors that maxima are over, the factors that index the scales, and whether it is backward."""
        if self.recipe.delayed:
            return []
        if self.recipe.scales == "tensor":
            of_weight = [] if known else [((*columns, *depth), (), False)]
            return [((*tokens, *depth), (), False), *of_weight, ((*tokens, *columns), (), True)]
        found = [
            (depth, tokens, False), (depth, columns, False), (columns, tokens, True), (columns, depth, True)
        ]  # fmt: skip
        if self.recipe.block:
            found = []
        if self.recipe.weight_gradients and self.recipe.scales != "line":
            found += [(tokens, columns, True), (tokens, depth, True)]
        return found
