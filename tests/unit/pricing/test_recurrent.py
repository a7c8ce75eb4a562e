"""Recurrent layers: what their steps take, and what autograd keeps of them."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from costmodels import RecurrentShape, best_rate, matmul_time, recurrent_backward_time, recurrent_time
from hardware_profiles import load_profile
from planner.graph.operator_graph import Operator, OperatorGraph
from planner.graph.rewriting.recurrent import GATES
from planner.graph.trace import trace
from planner.pricing.operator_price import price_operator
from planner.sharding.mesh import build_mesh
from planner.sharding.rule import named_strategy
from planner.sharding.rules import rule_of

CLUSTER = load_profile("h100-80gb").with_devices(8)
DEVICE = CLUSTER.device
SHAPE = RecurrentShape(batch=64, steps=100, inputs=512, outputs=512, gates=2048, hidden=512, directions=1)


class Net(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(24, 24), layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(self.first(x))[0].mean()
        return result


def traced(layer: nn.RNNBase, samples: int) -> tuple[OperatorGraph, Operator]:
    graph = trace(Net(layer), (torch.ones(samples, 12, 24),))
    return graph, next(op for op in graph.operators if op.op in GATES)


def test_steps_follow_each_other() -> None:
    every, one = recurrent_time(SHAPE, "bf16", DEVICE), recurrent_time(replace(SHAPE, steps=1), "bf16", DEVICE)
    step = matmul_time(64, 2048, 512, 1, "bf16", DEVICE)
    assert 100 * step < every <= 100 * one
    both = recurrent_time(replace(SHAPE, directions=2), "bf16", DEVICE)
    assert 1.9 * every < both <= 2 * every


@pytest.mark.parametrize("extent", ["batch", "steps", "inputs", "hidden"])
def test_laws(extent: str) -> None:
    """Monotone, subadditive, and nothing beats the work at the best rate."""
    for time, work in ((recurrent_time, 2.0), (recurrent_backward_time, 4.0)):
        base = time(SHAPE, "bf16", DEVICE)
        assert base >= work * 64 * 100 * 2048 * (512 + 512) / best_rate("recurrent", "bf16", DEVICE)
        more = {extent: 3 * getattr(SHAPE, extent)}
        if extent == "hidden":
            more |= {"outputs": 3 * 512, "gates": 3 * 2048}
        longer = time(replace(SHAPE, **more), "bf16", DEVICE)
        assert base <= longer <= (9 if extent == "hidden" else 3) * base


def test_a_part_of_the_batch_takes_more_than_its_share() -> None:
    """Steps wait for each other, however few samples there are."""
    graph, op = traced(nn.LSTM(24, 32, batch_first=True), 32)
    rule, types = rule_of(graph, op), [graph.types[name] for name in op.operands]
    results = [graph.types[str(name)] for name in op.results]
    chosen = [named_strategy(rule, (factor,), op.name) for factor in (None, "b")]
    prices = price_operator(rule, chosen, types, results, [True] * len(types), build_mesh(CLUSTER, (8,)), CLUSTER)
    whole, part = prices.forward
    assert whole / 8 < part < whole
    assert prices.flops[0] == 3 * 2 * 32 * 12 * 128 * (24 + 32)
    assert prices.flops[1] == prices.flops[0] / 8


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_what_autograd_keeps(kind: type[nn.RNNBase], both: bool) -> None:
    """Of PyTorch's own steps, which run on CPUs."""
    layer = kind(24, 32, batch_first=True, bidirectional=both)
    rule = rule_of(*traced(layer, 4))
    expected = sum(
        term.coefficient * math.prod(rule.factors[factor].extent for factor in term.factors)
        for term in rule.saved_extra
    )
    known = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    x = torch.randn(4, 12, 24, requires_grad=True)
    with torch.backends.mkldnn.flags(enabled=False), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x)
    found = sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in known)
    assert 0.85 * expected <= found <= expected
