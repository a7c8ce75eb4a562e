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


@pytest.mark.parametrize("way", ["no_grad", "detach"])
def test_what_is_detached_has_no_gradient_from_its_beginning_on(way: str) -> None:
    graph = trace(Distilled(way), (torch.randn(2, 4),))
    inside = [op for op in graph.operators if op.module.startswith("teacher") and op.op != DETACH]
    assert inside
    assert not {name for op in inside for name in op.results} & graph.differentiable
    (detach,) = (op for op in graph.operators if op.op == DETACH)
    assert graph.operators[graph.producer[detach.operands[0]]].module == "student"


def test_what_makes_indices_is_left_as_it_is() -> None:
    graph = trace(Distilled("argmax"), (torch.randn(2, 4),))
    assert DETACH not in [op.op for op in graph.operators]
