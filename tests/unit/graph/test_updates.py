"""Buffers that the forward pass changes: their new contents are values of the graph, everything else is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner.errors import ModelError
from planner.graph.blocks import share_values
from planner.graph.kinds import find_blocks
from planner.graph.operator_graph import OperatorGraph
from planner.graph.rewriting.updates import UPDATE
from planner.graph.trace import trace
from planner.models.zoo import build_model
from tests.refusals import refused

WIDTH = 6


class Stateful(nn.Module):
    """A linear layer, batch norm, a buffer, and what `body` does with them."""

    def __init__(self, body: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("state", torch.zeros(WIDTH))
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def traced(body: Callable[..., torch.Tensor]) -> OperatorGraph:
    return trace(Stateful(body), (torch.ones(4, WIDTH),))


def normal(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.norm(m.linear(x)).mean()


def counted(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.state.add_(1)
    return (m.linear(x) * m.state).mean()


def without_a_counter(m: Any, x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(m.linear(x), m.norm.running_mean, m.norm.running_var, training=True).mean()


def twice(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.norm(m.linear(m.norm(x))).mean()


def test_running_statistics_of_a_module_pass_one_operator() -> None:
    graph = traced(normal)
    buffers = ("norm.num_batches_tracked", "norm.running_mean", "norm.running_var")
    assert tuple(buffer for buffer, _ in graph.updates) == buffers
    (update,) = (op for op in graph.operators if op.op == UPDATE)
    assert (update.name, update.module) == ("norm/update", "norm")
    assert {value for _, value in graph.updates} == set(update.results)
    assert [graph.types[value] for _, value in graph.updates] == [graph.types[buffer] for buffer in buffers]
    assert set(buffers) <= graph.data_dependent
    assert "norm.running_mean" not in graph.differentiable


def test_what_is_read_after_a_change_is_the_new_content() -> None:
    graph = traced(counted)
    assert [op.op for op in graph.operators] == [
        "aten.add.Tensor", UPDATE, "aten.linear.default", "aten.mul.Tensor", "aten.mean.default",
    ]  # fmt: skip
    assert graph.operators[3].operands == ("linear/linear", "add")
    assert graph.updates == (("state", "update"),)


def test_statistics_that_the_schema_hides_are_seen() -> None:
    graph = traced(without_a_counter)
    assert [buffer for buffer, _ in graph.updates] == ["norm.running_mean", "norm.running_var"]


def test_a_module_that_is_called_twice_changes_its_buffers_once() -> None:
    graph = traced(twice)
    assert [op.op for op in graph.operators].count(UPDATE) == 1
    first, second = (op for op in graph.operators if "batch_norm" in op.op)
    assert second.operands[3:] == (first.results[3], first.results[4])


def test_the_fingerprint_knows_the_updates() -> None:
    prints = {traced(body).fingerprint() for body in (normal, counted, lambda m, x: m.linear(x).mean())}
    assert len(prints) == 3


def test_evaluation_changes_nothing() -> None:
    graph = trace(Stateful(normal).eval(), (torch.ones(4, WIDTH),))
    assert graph.updates == ()
    assert "aten.batch_norm.default" in [op.op for op in graph.operators]


@pytest.mark.slow
@pytest.mark.thorough
def test_alike_blocks_are_traced_once_and_change_their_own_buffers() -> None:
    built = build_model("resnet-tiny", dtype="float32")
    short, full = (trace(built.module, built.args, full=full) for full in (False, True))
    assert short == full
    assert {buffer for buffer, _ in short.updates} == {name for name, _ in built.module.named_buffers()}


def test_updates_survive_the_sharing_of_values() -> None:
    graph = traced(counted)
    shared, _ = share_values(graph, find_blocks(graph))
    assert all(value in shared.producer for _, value in shared.updates)


def assign(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.state = m.state + 1
    return (m.linear(x) * m.state).mean()


def test_a_buffer_that_is_assigned_is_refused() -> None:
    with refused(ModelError, "Stateful", "state", "add_"):
        traced(assign)
