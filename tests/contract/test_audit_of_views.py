"""An audit of operators that make several views, of which each has the memory of an operand of its own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
import runtime
from hardware_profiles import load_profile
from planner.graph.trace import trace


class Pixels(nn.Module):
    """Channels last, compared by `broadcast_tensors`, which copies nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = torch.broadcast_tensors(self.first(x).permute(0, 2, 3, 1), self.second(x).permute(0, 2, 3, 1))
        return F.huber_loss(one.sigmoid() + other, other)


def test_views_of_several_operands() -> None:
    graph = trace(Pixels(), (torch.randn(2, 3, 16, 16),))
    plan = planner.search(graph, "cpu", batch=2, devices=1, precision="fp32").plan
    (stage,) = runtime.audit(plan, graph, 2, load_profile("cpu"))
    assert not stage.unequal
    assert stage.predicted_peak == pytest.approx(stage.peak, rel=0.02)
