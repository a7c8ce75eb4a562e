"""A model without causal attention is planned for engines whose rings are in zigzag order."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import planner


class Encoder(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.products, self.out, self.causal = nn.Linear(32, 96), nn.Linear(32, 32), causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        each = self.products(x).view(2, 16, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind()
        y = F.scaled_dot_product_attention(*each, is_causal=self.causal)
        return (x + self.out(y.transpose(1, 2).flatten(2))).square().mean()


@pytest.mark.parametrize("causal", [False, True])
def test_zigzag_is_asked_of_causal_rings_alone(causal: bool) -> None:
    asked = {"args": (torch.ones(2, 16, 32),), "devices": 2, "engine": "torchtitan", "global_batch": 2}
    found = planner.search(Encoder(causal), "h100-80gb", **asked)
    assert found.plans
    found = planner.search(Encoder(causal), "h100-80gb", pinned={"context": 2}, **asked)
    assert bool(found.plan.mesh.zigzag) == causal
