"""Literals of a model's code have their values where the model is traced without data."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from planner.graph.trace import trace
from planner.graph.tracing.on_meta import on_meta

MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tensor": lambda x: torch.tensor([2.0, 3.0], device=x.device),
    "as_tensor": lambda x: torch.as_tensor([2.0, 3.0], device=x.device),
    "as_tensor without a device": lambda x: torch.as_tensor([2.0, 3.0]).to(x.device),
    "asarray": lambda x: torch.asarray([2.0, 3.0], device=x.device),
    "new_tensor": lambda x: x.new_tensor([2.0, 3.0]),
    "as_tensor of a tensor": lambda x: torch.as_tensor(torch.tensor([2.0, 3.0], device=x.device), dtype=torch.float32),
}


class Scaled(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(2, 2), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * MADE[self.how](x)).mean()


@pytest.mark.parametrize("how", MADE)
def test_literals_have_their_values(how: str) -> None:
    graph = trace(on_meta(Scaled(how)), (torch.zeros(4, 2, device="meta"),))
    (values,) = graph.constants.values()
    assert values.tolist() == [2.0, 3.0]
