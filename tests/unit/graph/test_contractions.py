"""Products of many tensors are taken apart as PyTorch computes them, and each is a product to the planner."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from planner.errors import ModelError
from planner.graph.operator_graph import OperatorGraph, ValueRef
from planner.graph.rewriting.contractions import EINSUM, read_equation, with_pairs
from planner.graph.torch_operators import resolve
from planner.graph.trace import trace
from planner.sharding.rules import rule_of


class Called(nn.Module):
    """Means of a call of einsum with one weight among its tensors."""

    def __init__(self, equation: str, weight: torch.Tensor) -> None:
        super().__init__()
        self.equation, self.weight = equation, nn.Parameter(weight)

    def forward(self, *others: torch.Tensor) -> torch.Tensor:
        return torch.einsum(self.equation, self.weight, *others).square().mean()


def computed(graph: OperatorGraph, values: dict[str, Any]) -> torch.Tensor:
    """The loss of a graph, operator by operator."""

    def given(argument: Any) -> Any:
        if isinstance(argument, ValueRef):
            return values[argument.name]
        return [given(one) for one in argument] if isinstance(argument, tuple) else argument

    for op in graph.operators:
        made = resolve(op.op)(*map(given, op.arguments), **{key: given(value) for key, value in op.keywords})
        (name,) = op.results
        assert tuple(made.shape) == graph.types[str(name)].shape
        values[str(name)] = made
    return values[graph.loss]


def drawn(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


CALLS = [
    ("ab,bc,cd,de->ae", [(2, 3), (3, 4), (4, 5), (5, 6)], ["ab,bc->ac", "ac,cd->ad", "ad,de->ae"]),
    ("bld,bln,bld->bldn", [(2, 3, 4), (2, 3, 5), (2, 3, 4)], ["bld,bln->bldn", "bldn,bld->bldn"]),
    ("bij,bk,b->k", [(2, 3, 4), (2, 5), (2,)], ["bij->b", "b,bk->bk", "bk,b->k"]),
    ("bii,bj->ji", [(2, 3, 3), (2, 4)], ["bii,bj->ji"]),
    ("i,kii,i->i", [(3,), (2, 3, 3), (3,)], ["kii->i", "i,i->i", "i,i->i"]),
    ("...i,ij,jk->...k", [(2, 7, 3), (3, 4), (4, 5)], ["abi,ij->abj", "abj,jk->abk"]),
    ("ij , jk", [(2, 3), (3, 4)], ["ij,jk->ik"]),
    ("ij,ij->", [(2, 3), (2, 1)], ["ij,ij->"]),
    ("ij,k->", [(2, 3), (4,)], ["ij->", "k->", ",->"]),
]


@pytest.mark.parametrize(("equation", "shapes", "parts"), CALLS, ids=[equation for equation, _, _ in CALLS])
def test_products_are_taken_two_at_a_time(equation: str, shapes: list[tuple[int, ...]], parts: list[str]) -> None:
    weight, *others = drawn(*shapes)
    module = Called(equation, weight)
    graph = trace(module, tuple(others))
    called = [op for op in graph.operators if op.op == EINSUM]
    assert [op.arguments[0] for op in called] == parts
    values = {"weight": weight} | dict(zip(graph.inputs, others, strict=True))
    assert computed(graph, values).item() == pytest.approx(module(*others).item(), rel=1e-12)
    for op in graph.operators:
        rule_of(graph, op)


def test_the_order_is_that_of_a_path() -> None:
    """As `opt_einsum` gives one: the last two first, their product behind the others."""
    weight, *others = drawn((2, 3), (3, 4), (4, 4))
    graph = trace(Called("ab,bc->ac", weight), (others[0],))
    (op,) = [op for op in graph.operators if op.op == EINSUM]
    inputs = (*graph.inputs, "more")
    more = replace(
        op,
        arguments=("ab,bc,cd->ad", tuple(map(ValueRef, ("weight", *inputs)))),
        keywords=(("path", (1, 2, 0, 1)),),
    )
    types = graph.types | {"more": replace(graph.types["weight"], shape=(4, 4))}
    operators = tuple(more if one is op else one for one in graph.operators)
    taken = with_pairs(replace(graph, types=types, inputs=inputs, operators=operators))
    assert [one.arguments[0] for one in taken.operators if one.op == EINSUM] == ["bc,cd->bd", "ab,bd->ad"]
    values = {"weight": weight} | dict(zip(inputs, others, strict=True))
    expected = torch.einsum("ab,bc,cd->ad", weight, *others).square().mean()
    assert computed(taken, values).item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("equation", "op_class", "flops"),
    [
        ("oi,bsi->bso", "matmul", 2.0 * 4 * 8 * 6 * 10),
        ("bi,bsi->bsi", "elementwise", 4 * 8 * 10),
        ("ehf,bsh->bsef", "matmul", 2.0 * 3 * 10 * 5 * 4 * 8),
    ],
)
def test_what_is_summed_over_both_is_a_product(equation: str, op_class: str, flops: float) -> None:
    extents = {"o": 6, "i": 10, "b": 4, "s": 8, "e": 3, "h": 10, "f": 5}
    shapes = [tuple(extents[letter] for letter in each) for each in equation.partition("->")[0].split(",")]
    weight, *others = drawn(*shapes)
    graph = trace(Called(equation, weight), tuple(others))
    rule = next(rule_of(graph, op) for op in graph.operators if op.op == EINSUM)
    assert rule.op_class == op_class
    (work,) = rule.work
    found = work.coefficient
    for factor in work.factors:
        found *= rule.factors[factor].extent
    assert found == flops


@pytest.mark.parametrize(
    ("text", "ranks", "why"),
    [
        ("ab,bc->ac", [2], "called with 1 tensors"),
        ("ab->a", [3], "does not fit tensors of 3 dims"),
        ("abc...->a", [2], "does not fit tensors of 2 dims"),
        ("...a->a", [60], "more dims than there are letters"),
    ],
)
def test_what_is_no_equation_of_its_tensors(text: str, ranks: list[int], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        read_equation(text, ranks)
