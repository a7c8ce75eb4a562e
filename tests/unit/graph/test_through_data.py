"""A weight that is changed through `.data` while the model runs is refused in one sentence."""

import torch
from torch import nn

from planner.errors import ModelError
from planner.graph.trace import trace
from tests.refusals import refused


class Clamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(Layer())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inside(x).square().mean()
        return made


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-1, 1)
        return super().forward(x)


def test_a_weight_that_is_changed_through_data() -> None:
    with refused(ModelError, "Clamped", "inside.0", "through .data", "weight.clamp(-1, 1)"):
        trace(Clamped(), (torch.ones(4, 8),))
