"""An audit of scores that end in indices: what chooses has no gradient, neither in a plan nor in a run."""

import pytest
import torch
from torch import nn

import planner
import runtime
from hardware_profiles import load_profile
from planner.graph.trace import trace

E, GROUPS, H = 8, 4, 16


class Grouped(nn.Module):
    """A router that chooses groups of experts by their best two scores, and experts in them (DeepSeek-V3)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scores, self.experts = nn.Linear(H, H), nn.Linear(H, E), nn.Embedding(E, H)
        self.bias = nn.Buffer(torch.linspace(-0.1, 0.1, E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        scores = self.scores(y).sigmoid()
        ranked = scores + self.bias
        best = ranked.view(-1, GROUPS, E // GROUPS).topk(2, dim=-1)[0].sum(-1).topk(2, dim=-1)[1]
        open_groups = torch.zeros_like(ranked[:, :GROUPS]).scatter(1, best, 1.0)
        open_experts = open_groups[:, :, None].expand(-1, GROUPS, E // GROUPS).reshape(-1, E)
        chosen = ranked.masked_fill(open_experts == 0, 0.0).topk(3, dim=-1)[1]
        weights = scores.gather(1, chosen)
        return (self.experts(chosen) * weights[:, :, None]).sum(1).sub(y).square().mean()


@pytest.mark.parametrize("operator", ["add", "topk", "masked_fill"])
def test_a_router_with_groups(operator: str) -> None:
    graph = trace(Grouped(), (torch.randn(8, H),))
    asked = {"devices": 2, "global_batch": 8, "precision": "fp32", "shard": {operator: "d1"}}
    plan = planner.search(graph, "cpu", batch=8, **asked).plan
    (stage,) = runtime.audit(plan, graph, 8, load_profile("cpu").with_devices(2))
    assert not stage.unequal
