"""The rule of a mixture of experts, whose work is counted in rows.

    tokens  b s h    choices  b s k    matrices  e f h          rows on a device = b s k e / E  tokens that it can get,
                                                                times the share of the experts that it has

E is the number of all experts, whose matrices are gate, up and down, or up and down. On an axis that is given e@b, a
device has a part of the experts and can get tokens from all devices of the axis; on an axis that is given e, it has a
part of the experts and all tokens. So the loops of rows are b s k e, an exchange cuts only e of them, and every row
counts 1 / E. Where experts are cut, the fullest device has `imbalance` times the average. With a capacity every sample
and expert has the same number of rows, whoever chooses the expert.

Experts follow MegaBlocks (Gale et al. 2022, arXiv 2211.15841): rows are sorted by expert and multiplied in groups. Rows
are multiplied with the weight of their expert before the last product, as in Megatron, so that its result need not be
kept. With an exchange rows are sent to the devices of their experts and back (GShard, Lepikhin et al. 2020): two
all-to-alls forward, two backward; over several axes one after the other. Before them the counts of rows are sent, and
with the rows their weights. A token that is sent `once` crosses the outermost axis (the nodes) as one row for each part
of the axis that has any of its experts. It is copied there for each of them, and their results are summed there before
they return (node-limited routing: DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.2; DeepEP).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from planner.fp8_recipes import BLOCK, RECIPES, Recipe
from planner.graph.call import Call
from planner.sharding.rule import FactorKind, InnerCollective, Once, Rule, Work
from planner.sharding.rules.einsum import Einsum
from planner.sharding.rules.spec import RuleSpec

_CAPACITY, _IMBALANCE, _ONCE = (6, "capacity"), (7, "imbalance"), (8, "once")
_GROUPS, _CHOSEN_GROUPS = (9, "groups"), (10, "chosen_groups")
_FP8, _DISPATCH = (11, "fp8"), (12, "dispatch")
_TENSORS = 6
"""The number of tensor arguments; settings follow them. Biases are given by name."""
_SCALE = 4.0
"""Bytes of the largest element that a scale is made from: fp32."""
_INDEX = 8
"""Bytes of an index of a row, or of a count of rows."""

_INDICES = 4
"""Indices that are kept of every row: its choice, the row of its choice, and the same after an exchange."""

_INDICES_ONCE = 2
"""Indices that are kept beside them where a token is sent once: for each row the row that came with its token, and for
each row that is sent its token."""

_FIRST = 3
"""Where the first matrix stands among the operands."""


def matrices_of(rule: Rule) -> tuple[int, ...]:
    """Where the matrices of experts stand among the operands of their rule: gate, up and down, or up and down."""
    return tuple(at for at in range(_FIRST, len(rule.operands)) if at not in rule.addends)


def _plain(gated: bool) -> Einsum:
    """The rule without the counts of rows. Without a gate nothing is given at its place, nor at that of its bias."""
    down = _FIRST + (2 if gated else 1)
    first, biases = tuple(range(_FIRST, down)), tuple(range(down + 1, 2 * down - _FIRST + 1))
    return Einsum(
        pattern="b s h, b s k, b s k, e f h, e f h, e h f, e f, e f -> b s h",
        op_class="experts",
        positions=(0, 1, 2, 3, 4, 5, 6, 7),
        blocked="h k",
        # a product for the gradient of each matrix, and one by each matrix for the gradient of the tokens
        gradient_work=1 / (len(first) + 1),
        gradient_units=((0, len(first) + 1.0), (1, 0.0)),
        addends=biases,
        saves=(*((at, (0, 1)) for at in first), (down, (0, 1, *first, *biases))),
        roles=(("tokens", "b s"), ("choices", "k"), ("experts", "e"), ("width", "f"), ("hidden", "h")),
    )


@final
@dataclass(frozen=True, kw_only=True)
class Experts(RuleSpec):
    """Tokens, weights and numbers of their experts, gate (if there is one), up and down of all experts, and biases of
    gate and up."""

    def build(self, call: Call) -> Rule:
        capacity, imbalance = call.argument(*_CAPACITY, 0), call.argument(*_IMBALANCE, 1.0)
        assert isinstance(capacity, int), call  # as the operator's schema has it
        assert isinstance(imbalance, float), call
        element, hidden = call.operands[0].element_bytes, call.operands[0].shape[2]
        fp8, dispatch = call.argument(*_FP8, ""), call.argument(*_DISPATCH, False)
        recipe = RECIPES[fp8] if isinstance(fp8, str) and fp8 else None
        # bytes of a token when sent: in 8 bits with a scale for each block, or as it is
        token = hidden + _SCALE * -(-hidden // BLOCK) if dispatch else float(hidden * element)
        once = self._once(call, token), self._once(call, hidden * element)
        base = _plain(call.arguments[_FIRST] is not None)
        # A capacity belongs to one sample, whose tokens are counted in their order.
        blocked = f"{base.blocked} s" if capacity else base.blocked
        exchanges = (("e", "b"),) if capacity else (("e", "b"), ("e", "s"))
        told = dict(call.keywords)
        tensors = (*call.arguments[:_TENSORS], told.get("gate_bias"), told.get("up_bias"))
        plain = replace(call, arguments=tensors, keywords=())
        rule = replace(base, blocked=blocked, exchanges=exchanges).build(plain)
        factors = tuple(
            replace(factor, imbalance=imbalance) if factor.name == "e" and not capacity else factor
            for factor in rule.factors
        )
        rows, first = _Rows(rule, call, capacity), len(matrices_of(rule)) - 1
        return replace(
            rule,
            factors=factors,
            work=(rows.work(2.0 * (first + 1), "f h"),),
            saved_extra=(  # rows; what the first matrices make, and p, which goes into down; weights and indices
                rows.work(element, "h"),
                rows.work((first + 1.0) * element, "f"),
                rows.work(element + (_INDICES + _INDICES_ONCE * (once[0] is not None)) * _INDEX, ""),
            ),
            scratch=(  # gradients of those, and u where it is bounded
                rows.work(1.0 * element, "h"),
                rows.work((first + (1.0 if told.get("limit") else 0.0)) * element, "f"),
            ),
            inner=(
                *rows.messages(element, token, counted=not capacity, once=once),
                *(() if recipe is None else rows.agreed(recipe)),
            ),
            computed=_computed(recipe),
            gained=1.0 if recipe is None else recipe.gained,
            scaled_in_blocks=recipe is not None and recipe.block > 0,
        )

    @staticmethod
    def _once(call: Call, row: float) -> Once | None:
        """The rows of a token that are sent once, if any."""
        groups, chosen_groups = call.argument(*_GROUPS, 1), call.argument(*_CHOSEN_GROUPS, 1)
        assert isinstance(groups, int), call
        assert isinstance(chosen_groups, int), call
        if not call.argument(*_ONCE, False):
            return None
        chosen = call.operands[1].shape[2]
        return Once(chosen=chosen, groups=groups, chosen_groups=chosen_groups, row=int(row))


def _computed(recipe: Recipe | None) -> tuple[str, str, str]:
    """The dtypes in which products compute results, gradients of rows, and gradients of matrices."""
    if recipe is None:
        return "", "", ""
    return recipe.rate, recipe.rate, recipe.rate if recipe.weight_gradients else ""


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a call: how many there are for each point of the loops that count them."""

    rule: Rule
    call: Call
    capacity: int

    def work(self, coefficient: float, others: str) -> Work:
        """`coefficient` for every row, times further factors."""
        each = float(self.capacity) if self.capacity else 1.0 / self._experts
        return Work(coefficient=coefficient * each, factors=self._factors(others))

    def messages(
        self, element: int, token: float, *, counted: bool, once: tuple[Once | None, Once | None]
    ) -> Iterator[InnerCollective]:
        """The messages on each axis that is given an exchange: rows of `token` bytes there, and rows of `element` bytes
        per element back; `once` says which rows of a token are sent once, there and back."""
        row = float(element * self.call.operands[0].shape[2])
        exchanges = [at for at, factor in enumerate(self.rule.factors) if factor.kind is FactorKind.EXCHANGE]
        for exchange in exchanges:
            if counted:
                yield InnerCollective(
                    kind="all_to_all", factor=exchange, factors=(), element_bytes=_INDEX * self._experts, forward=1
                )
            if once[0] is not None:  # for each row the place of its token among the tokens that are sent
                places = self.work(_INDEX, "")
                yield InnerCollective(
                    kind="all_to_all", factor=exchange, factors=places.factors, element_bytes=places.coefficient,
                    forward=1, outermost=True,
                )  # fmt: skip
            ways: tuple[tuple[float, int, Once | None], ...] = ((token, 1, once[0]), (row, 1, once[1]))
            ways = ((row, 2, once[1]),) if token == row else ways
            # and the weight of each row, whose gradient comes back where weights have one
            asked = *((*way, None) for way in ways), (float(element), 1, None, 1)
            for nbytes, times, one, gradient_of in asked:
                sent = self.work(nbytes, "")
                yield InnerCollective(
                    kind="all_to_all",
                    factor=exchange,
                    factors=sent.factors,
                    element_bytes=sent.coefficient,
                    forward=times,
                    backward=times,
                    gradient_of=gradient_of,
                    once=one,
                )

    def agreed(self, recipe: Recipe) -> Iterator[InnerCollective]:
        """The maxima that devices exchange for rows and matrices of which each has pieces: devices with other tokens of
        the same experts, and devices with another part of each expert (`planner.models.experts.fp8`)."""
        index = self.rule.index  # without dims of one element
        tokens, width, e = [index[name] for name in ("b", "s") if name in index], index["f"], index["e"]
        wide, hidden = self.call.operands[_FIRST].shape[1:]
        matrices = len(matrices_of(self.rule))
        first = matrices - 1

        def said(factor: int, each: Work, forward: int, backward: int, blocks: int = 0) -> InnerCollective:
            return InnerCollective(
                kind="all_reduce", factor=factor, factors=each.factors, element_bytes=_SCALE * each.coefficient,
                forward=forward, backward=backward, blocks=blocks,
            )  # fmt: skip

        if recipe.delayed:
            return
        of_experts, of_rows = Work(coefficient=1.0, factors=(e,)), self.work(1.0, "")
        if recipe.scales == "tensor":
            # of each matrix forward its rows; backward those of its gradient, and both sides of the matrix's
            yield from (said(factor, of_experts, matrices, 3 * matrices) for factor in tokens)
            # forward p and the matrices; backward of g and u, the matrices, and one side of each matrix's
            yield said(width, of_experts, 1 + matrices, first + 2 * matrices)
            return
        if recipe.weight_gradients:  # both sides of each matrix
            for factor in tokens:
                yield said(factor, Work(coefficient=float(hidden), factors=(e,)), 0, matrices)
                yield said(factor, Work(coefficient=1.0, factors=(e, width)), 0, matrices)
        if recipe.scales == "row":  # down forward, the first ones backward: of their rows, and of their columns
            yield said(width, of_rows, 1, first)
            yield said(width, Work(coefficient=float(hidden), factors=(e,)), 1, first)
            return
        block = recipe.block
        across, along = -(-wide // block), -(-hidden // block)
        yield said(width, self.work(float(across), ""), 1, first, block)
        if recipe.scales == "line":  # of their rows alone, of which each column has one
            yield said(width, Work(coefficient=float(across * hidden), factors=(e,)), 1, first, block)
            return
        yield said(width, Work(coefficient=float(across * along), factors=(e,)), matrices, matrices, block)

    @property
    def _experts(self) -> int:
        return self.call.operands[_FIRST].shape[0]

    def _factors(self, others: str) -> tuple[int, ...]:
        names: Sequence[str] = ("b", "e") if self.capacity else ("b", "s", "k", "e")
        return tuple(self.rule.index[name] for name in (*names, *others.split()) if name in self.rule.index)
