"""Regions of autocast in a model: the precision of the plan takes their place."""

import pytest
import torch
from torch import nn

from planner.graph.trace import trace
from planner.graph.tracing.autocast import without_autocast


class Casts(nn.Module):
    """`device` None: that of the input, as people write it."""

    def __init__(self, device: str | None, region: torch.autocast | None = None) -> None:
        super().__init__()
        self.linear, self.device, self.region = nn.Linear(4, 4), device, region

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        region = self.region or torch.autocast(self.device or x.device.type, dtype=torch.bfloat16)
        with region:
            y = self.linear(x)
        with torch.autocast(device_type=x.device.type, enabled=False):
            return y.float().square().mean()


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("place", ["meta", "cpu"])
def test_nothing_is_cast_where_a_model_is_traced(device: str | None, place: str) -> None:
    graph = trace(Casts(device).to(place), (torch.ones(2, 4),))
    (linear,) = (op for op in graph.operators if op.op == "aten.linear.default")
    assert graph.types[str(linear.results[0])].dtype == "float32"


def test_a_region_that_the_model_keeps_is_none_either() -> None:
    module = Casts("cpu", torch.autocast("cpu", dtype=torch.bfloat16))
    made: list[torch.dtype] = []
    module.linear.register_forward_hook(lambda _, given, result: made.append(result.dtype))
    with without_autocast():
        module(torch.ones(2, 4))
    module(torch.ones(2, 4))
    assert made == [torch.float32, torch.bfloat16]
