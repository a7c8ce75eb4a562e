"""Weights that the loss does not reach are frozen, and nothing is kept of what is computed to be detached."""

import pytest
import torch
from torch import nn

from planner.graph.operator_graph import DETACH
from planner.graph.trace import trace


class Distilled(nn.Module):
    """A student, a teacher whose weights nobody froze, and a layer that is called by nobody."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.student, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.teacher = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.student(x)
        if self.way == "no_grad":
            with torch.no_grad():
                target = self.teacher(y)
        elif self.way == "detach":
            target = self.teacher(y).detach()
        else:
            target = self.teacher(y).argmax(-1, keepdim=True).to(y.dtype)
        return (y - target).square().mean()


WAYS = ("no_grad", "detach", "argmax")


@pytest.mark.parametrize("way", WAYS)
def test_only_what_the_loss_reaches_is_trained(way: str) -> None:
    module, x = Distilled(way), torch.randn(2, 4)
    graph = trace(module, (x,))
    module(x).backward()
    reached = {name for name, weight in module.named_parameters() if weight.grad is not None}
    assert reached == {"student.weight", "student.bias"}
    assert {one.name for one in graph.parameters if one.trainable} == reached


@pytest.mark.parametrize("way", WAYS)
def test_what_no_gradient_comes_to_has_no_gradient_from_its_beginning_on(way: str) -> None:
    graph = trace(Distilled(way), (torch.randn(2, 4),))
    inside = [op for op in graph.operators if op.module.startswith("teacher") and op.op != DETACH]
    assert inside
    assert not {name for op in inside for name in op.results} & graph.differentiable
    (detach,) = (op for op in graph.operators if op.op == DETACH)
    assert graph.operators[graph.producer[detach.operands[0]]].module == "student"


class Measured(nn.Module):
    """A loss, beside it what it was right about, and what a layer makes that nobody asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.other = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.first(x)
        scores = self.last(y)
        right = (scores.argmax(-1) == target).float().mean()
        return {"loss": nn.functional.cross_entropy(scores, target), "right": right, "other": self.other(y).relu()}


def test_what_the_loss_does_not_read_is_not_computed() -> None:
    graph = trace(Measured(), (torch.randn(2, 4), torch.tensor([0, 2])))
    assert [op.op.split(".")[1] for op in graph.operators] == ["linear", "linear", "cross_entropy_loss"]
    assert {name for name in graph.types if name in graph.producer} == {op.results[0] for op in graph.operators}
    assert [one.name for one in graph.parameters if not one.trainable] == ["other.weight", "other.bias"]


class Forgotten(nn.Module):
    """A layer that drops elements of what nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        self.drop(self.other(y)).relu()
        return self.drop(y).mean()


def test_what_drops_elements_stays_and_has_no_gradient() -> None:
    """The module as it was written drops them as well, and is given the same ones in the order of its calls."""
    graph = trace(Forgotten(), (torch.randn(2, 4),))
    names = [op.op.split(".")[1] for op in graph.operators]
    assert names == ["linear", "detach", "linear", "dropout", "dropout", "mean"]
    assert graph.differentiable.isdisjoint(name for op in graph.operators[1:4] for name in op.results)


class Chosen(nn.Module):
    """The rows of a table that are next to what a layer makes, by products or by differences."""

    def __init__(self, products: bool) -> None:
        super().__init__()
        self.first, self.table, self.products = nn.Linear(4, 4), nn.Parameter(torch.randn(6, 4)), products

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if self.products:
            apart = y.square().sum(-1, keepdim=True) - 2 * y @ self.table.t() + self.table.square().sum(-1)
            nearest = (-apart).max(-1)[1]
        else:
            nearest = (y[:, None] - self.table).abs().sum(-1).argmin(-1)
        return (y - self.table[nearest]).square().mean()


def test_products_that_make_indices_have_no_gradient() -> None:
    graph = trace(Chosen(products=True), (torch.randn(2, 4),))
    (product,) = (op for op in graph.operators if op.op == "aten.matmul.default")
    assert graph.differentiable.isdisjoint((*product.operands, *product.results))
    detached = [graph.producer.get(op.operands[0]) for op in graph.operators if op.op == DETACH]
    assert sorted(graph.operators[at].name if at is not None else "" for at in detached) == ["", "first/linear"]
    assert {one.name for one in graph.parameters if one.trainable} == {"first.weight", "first.bias", "table"}


def test_what_else_makes_indices_has_no_gradient() -> None:
    graph = trace(Chosen(products=False), (torch.randn(2, 4),))
    made = next(op for op in graph.operators if op.op == "aten.sub.Tensor")
    assert graph.differentiable.isdisjoint((*made.operands, *made.results))
