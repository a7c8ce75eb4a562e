"""Tensors that are joined and taken apart again at the same places."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace

BATCH, WIDTH = 2, 6


class Joined(nn.Module):
    """Three products, joined along a dim, and what is read of them."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor], dim: int = -1) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.read, self.dim = read, dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(torch.cat([self.a(x), self.b(x), self.c(x)], dim=self.dim)).sum()


def chunks(joined: torch.Tensor) -> torch.Tensor:
    a, b, c = joined.chunk(3, dim=-1)
    return a * b.square() * c.abs()


def sizes(joined: torch.Tensor) -> torch.Tensor:
    a, b, c = joined.split([WIDTH, WIDTH, WIDTH], dim=1)
    return a * b.square() * c.abs()


def slices(joined: torch.Tensor) -> torch.Tensor:
    return joined[..., :WIDTH] * joined[..., WIDTH:-WIDTH].square() * joined[..., 2 * WIDTH :].abs()


def views(joined: torch.Tensor) -> torch.Tensor:
    a, b, c = joined.view(-1, 3, 2, WIDTH // 2).unbind(dim=-3)
    return a * b.square() * c.abs()


def some(joined: torch.Tensor) -> torch.Tensor:
    return joined[..., WIDTH : 2 * WIDTH].square()


def made_of(read: Callable[[torch.Tensor], torch.Tensor], dim: int = -1) -> OperatorGraph:
    return trace(Joined(read, dim), (torch.randn(BATCH, WIDTH),))


def inputs_of(graph: OperatorGraph, op: str) -> list[str]:
    """What the operators of a kind read, each made by."""
    found = (name for each in graph.operators if each.op == f"aten.{op}.default" for name in each.operands)
    return [graph.operators[graph.producer[name]].name for name in found]


@pytest.mark.parametrize("read", [chunks, sizes, slices])
def test_parts_are_read_without_being_joined(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    graph = made_of(read)
    assert not any(op.op.split(".")[1] in ("cat", "chunk", "slice", "split_with_sizes") for op in graph.operators)
    assert inputs_of(graph, "square") == ["b/linear"]
    assert inputs_of(graph, "abs") == ["c/linear"]
    assert all(graph.types[name].shape == (BATCH, WIDTH) for name in ("a/linear", "b/linear", "c/linear"))


def test_each_part_is_viewed_by_itself() -> None:
    graph = made_of(views)
    (squared,) = (op for op in graph.operators if op.op == "aten.square.default")
    view = graph.operators[graph.producer[squared.operands[0]]]
    assert (view.op, view.operands, graph.types[view.results[0] or ""].shape) == (
        "aten.view.default", ("b/linear",), (BATCH, 2, WIDTH // 2),
    )  # fmt: skip
    assert not any(op.op == "aten.cat.default" for op in graph.operators)


def test_a_part_that_is_not_read_is_not_computed() -> None:
    graph = made_of(some)
    assert [op.name for op in graph.operators if op.op == "aten.linear.default"] == ["b/linear"]


@pytest.mark.parametrize(
    "read",
    [
        lambda joined: joined[..., : WIDTH + 1].square(),  # another place
        lambda joined: joined[..., ::2].square(),
        lambda joined: joined[:1].square(),  # another dim
        lambda joined: joined.chunk(2, dim=-1)[1].square(),  # in other parts
        lambda joined: joined.view(-1, 2, 3 * WIDTH // 2).unbind(1)[0].square(),
        lambda joined: joined.view(-1, 3, WIDTH).sum(1),
        lambda joined: chunks(joined).sum() + joined.sum(),  # whole as well
    ],
)
def test_what_is_read_in_other_pieces_stays_joined(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert sum(op.op == "aten.cat.default" for op in made_of(read).operators) == 1


def test_tensors_that_are_joined_along_another_dim_stay() -> None:
    graph = made_of(lambda joined: joined.chunk(3, dim=1)[0].square(), dim=0)
    assert sum(op.op == "aten.cat.default" for op in graph.operators) == 1


class Converting(nn.Module):
    """A join that converts one of its parts to the dtype of the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = torch.cat([self.a(x).bfloat16(), self.b(x)], dim=-1).chunk(2, dim=-1)
        return (a.exp() * b).sum()


def test_parts_that_are_converted_stay_joined() -> None:
    """Read by itself, such a part would have the dtype that it had before."""
    graph = trace(Converting(), (torch.randn(BATCH, WIDTH),))
    assert inputs_of(graph, "exp") == ["chunk"]
    assert sum(op.op == "aten.cat.default" for op in graph.operators) == 1
