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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.unflatten(-1, (4, 8)).transpose(1, 2) for one in self.qkv(x).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.silu(self.up(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_result_that_a_recomputed_block_keeps_is_viewed_as_in_its_first_run() -> None:
    """Heads of attention, side by side for each token; weight gradients that are deferred hold what they are read
    from."""
    module, x = Blocks(), torch.randn(8, 64, 32)
    pinned = {"recompute": "selective", "micro_batches": 2, "pipeline": 2, "schedule": "zb_h1"}
    plan = planner.search(module, "cpu", args=(x,), devices=2, precision="fp32", global_batch=16, pinned=pinned).plan
    assert any("attention" in name for group in plan.groups for name in group.kept)
    for stage in runtime.audit(plan, trace(module, (x,)), 8, load_profile("cpu").with_devices(2)):
        assert stage.predicted_peak == pytest.approx(stage.peak, rel=0.001)


class Unread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.unread = nn.Linear(4, 4), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).square().mean()


def test_weights_that_no_operator_reads_are_held() -> None:
    module, x = Unread(), torch.randn(2, 4)
    plan = planner.search(module, "cpu", args=(x,), devices=1, precision="fp32").plan
    (stage,) = runtime.audit(plan, trace(module, (x,)), 2, load_profile("cpu"))
    assert stage.live["weights"] == stage.predicted_live["weights"] == 4 * (20 + 65 * 64)
