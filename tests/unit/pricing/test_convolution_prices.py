"""A convolution is priced as the matrix product that an implicit GEMM makes of it, and reads its tensors once."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from costmodels import matmul_time, operator_time
from hardware_profiles import PYTORCH, Cluster, load_profile
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.pricing.operator_price import OperatorPrices, price_operator
from planner.sharding.mesh import build_mesh
from planner.sharding.rule import named_strategy
from planner.sharding.rules import rule_of

CLUSTER = load_profile("h100-80gb").with_devices(8)
MESH = build_mesh(CLUSTER, (8,))


class Net(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv2d(64, 64, 1, bias=False)
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(self.first(x)).mean()
        return result


def graph_of(layer: nn.Module) -> OperatorGraph:
    with torch.device("meta"):
        return trace(Net(layer).bfloat16(), (torch.zeros(32, 64, 56, 56, dtype=torch.bfloat16),))


def priced(layer: nn.Module, *strategies: str | None, cluster: Cluster = CLUSTER) -> OperatorPrices:
    graph = graph_of(layer)
    op = next(op for op in graph.operators if op.module == "layer")
    rule = rule_of(graph, op)
    types = [graph.types[name] for name in op.operands], [graph.types[name] for name in op.results if name]
    chosen = [named_strategy(rule, (factor,), op.name) for factor in strategies]
    return price_operator(rule, chosen, *types, [True, True], MESH, cluster)


def test_extents_and_bytes_are_those_of_the_implicit_product() -> None:
    prices = priced(nn.Conv2d(64, 128, 3, stride=2, padding=1, bias=False), None)
    rows, columns, depth = 32 * 28 * 28, 128, 64 * 9
    moved = 2.0 * (32 * 64 * 56 * 56 + 128 * 64 * 9 + rows * columns)
    wanted = matmul_time(*(np.array([float(n)]) for n in (rows, columns, depth, 1)), "bf16", CLUSTER.device, moved)
    assert prices.forward - prices.late[0] == pytest.approx(wanted)
    assert prices.flops[0] == 3 * 2.0 * rows * columns * depth  # forward, and the gradients of input and weight


def test_a_transposed_one_is_the_product_of_the_convolution_that_it_undoes() -> None:
    """Its input has the extents of that one's results: rows of what is read, columns of what each of them makes."""
    prices = priced(nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1, bias=False), None)
    rows, columns, depth = 32 * 56 * 56, 32 * 16, 64
    moved = 2.0 * (rows * depth + columns * depth + 32 * 32 * 112 * 112)
    wanted = matmul_time(*(np.array([float(n)]) for n in (rows, columns, depth, 1)), "bf16", CLUSTER.device, moved)
    assert prices.forward - prices.late[0] == pytest.approx(wanted)
    assert prices.flops[0] == 3 * 2.0 * rows * columns * depth


def test_a_window_of_one_is_a_linear_layer() -> None:
    prices = priced(nn.Conv2d(64, 128, 1, bias=False), None)
    wanted = matmul_time(32.0 * 56 * 56, 128.0, 64.0, 1.0, "bf16", CLUSTER.device)
    assert prices.forward[0] - prices.late[0][0] == pytest.approx(wanted)


def test_samples_groups_and_channels_divide_the_work() -> None:
    grouped = priced(nn.Conv2d(64, 128, 3, groups=16, bias=False), None, "n", "g")
    plain = priced(nn.Conv2d(64, 128, 3, bias=False), None, "n", "o", "i")
    for prices in (grouped, plain):
        assert prices.flops[1:] * 8 == pytest.approx(prices.flops[0])
    assert grouped.flops[0] * 16 == pytest.approx(plain.flops[0])
    assert plain.results[0][[1, 2, 3]] == pytest.approx(plain.results[0][0] / np.array([8, 8, 1]))


def test_gradients_in_fp32_are_added_by_a_pass_of_their_own() -> None:
    """As a hook of Megatron's does it, to the gradient that a plain product has written."""
    layer = nn.Conv2d(64, 128, 3, bias=False)
    wide = replace(PYTORCH, adds=True, accumulates=False)
    alone, added = (
        priced(layer, None, cluster=replace(CLUSTER, software=one)) for one in (replace(wide, adds=False), wide)
    )
    bytes_moved = (2 + 4 + 4) * 128.0 * 64 * 9
    passed = operator_time(
        op_class="elementwise", flops=0.0, bytes_moved=bytes_moved, dtype="bf16", device=CLUSTER.device
    )
    assert added.forward == alone.forward
    assert added.backward - alone.backward == pytest.approx(passed)


def test_depthwise_ones_take_a_pass_over_their_tensors() -> None:
    """And no less than one: the matrices of their channels would be tiles of 64 columns with one of them in use."""
    prices = priced(nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False), None)
    elements = 2 * 32 * 64 * 56 * 56
    passed = operator_time(
        op_class="elementwise", flops=0.0, bytes_moved=2.0 * elements, dtype="bf16", device=CLUSTER.device
    )
    tiles = matmul_time(*(np.array([float(n)]) for n in (32 * 56 * 56, 1, 9, 64)), "bf16", CLUSTER.device)
    forward = float(prices.forward[0] - prices.late[0][0])
    assert passed <= forward < 1.1 * passed < float(np.asarray(tiles)[0])
    assert forward < float(prices.backward[0]) < 3 * forward
