"""Numbers in the place of tensors: very common in models, and nothing of them is kept for the backward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner.graph.trace import trace
from planner.plan.binding.bind import prepare
from planner.pricing.liveness import liveness


class Scaled(nn.Module):
    """An embedding whose values go through arithmetic with numbers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.rows = nn.Embedding(16, 8)
        self.name = name

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.rows(tokens)
        x = {"multiply": x * 0.5, "divide": x / 3, "add": x + 1, "subtract": x - 2}[self.name]
        return F.cross_entropy(x.mean(1), labels) * 0.5


@pytest.mark.parametrize("name", ["multiply", "divide", "add", "subtract"])
def test_arithmetic_with_a_number_keeps_nothing(name: str) -> None:
    batch = torch.zeros(4, 6, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    graph, _ = prepare(trace(Scaled(name), batch))
    alive = liveness(graph)
    numbers = [at for at, op in enumerate(graph.operators) if op.op.endswith((".Tensor", ".Scalar"))]
    assert numbers
    assert all(not alive.saved[at] for at in numbers)
