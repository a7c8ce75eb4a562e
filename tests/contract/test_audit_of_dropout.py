"""An audit of attention that drops probabilities: this runtime has its scores in memory, whatever software the plan is
for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
import runtime
from hardware_profiles import load_profile, load_software
from planner.graph.trace import trace


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        q_BHTD, k_BHTD, v_BHTD = (
            part.unflatten(2, (2, 8)).transpose(1, 2) for part in self.inputs(x_BTD).split([16, 16, 16], dim=-1)
        )
        mixed_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, dropout_p=0.1, is_causal=True)
        return self.out(mixed_BHTD.transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.parametrize("software", ["pytorch", "megatron"])
def test_scores_are_in_memory_whatever_software_a_plan_is_for(software: str) -> None:
    graph = trace(Attends(), (torch.randn(2, 32, 16),))
    plan = planner.search(graph, "cpu", batch=2, devices=1, precision="fp32", software=software).plan
    cluster = load_profile("cpu").with_software(load_software(software))
    (stage,) = runtime.audit(plan, graph, 2, cluster)
    assert not stage.unequal
    assert stage.predicted_peak == pytest.approx(stage.peak, rel=0.02)
