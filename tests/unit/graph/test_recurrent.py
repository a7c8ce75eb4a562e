"""Recurrent modules in a graph: an operator for each layer."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from planner.errors import RuleError
from planner.graph.call import typed_call
from planner.graph.operator_graph import OperatorGraph
from planner.graph.rewriting.recurrent import GATES
from planner.graph.trace import trace
from planner.sharding.rules import RULES, rule_of

Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self, layers: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.layers = layers
        self.compute = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self.layers, x).square().mean()


def traced(layers: nn.Module, forward: Forward = lambda layers, x: layers(x)[0]) -> OperatorGraph:
    return trace(Net(layers, forward), (torch.ones(4, 3, 6),))


def calls(graph: OperatorGraph) -> list[str]:
    return [op.op.split(".")[1] for op in graph.operators if op.module == "layers"]


def test_each_layer_has_its_weights_its_first_state_and_drops_before_the_next() -> None:
    graph = traced(nn.GRU(6, 5, 3, batch_first=True, bidirectional=True, dropout=0.1))
    assert calls(graph) == ["zeros", "gru", "dropout", "zeros", "gru", "dropout", "zeros", "gru"]
    layers = [op for op in graph.operators if op.op in GATES]
    for number, op in enumerate(layers):
        weights = [name for name in op.operands if name in graph.parameter_names]
        assert len(weights) == 8
        assert all(f"_l{number}" in name for name in weights)
        assert graph.types[op.operands[1]].shape == (2, 4, 5)
        assert rule_of(graph, op).format().startswith("b s i, d b h, g i")
    assert graph.types[str(layers[-1].results[0])].shape == (4, 3, 10)


def test_states_that_are_given_or_read_are_taken_apart_and_joined() -> None:
    def twice(layers: nn.Module, x: torch.Tensor) -> torch.Tensor:
        _, states = layers(x)
        found: torch.Tensor = layers(x, states)[0]
        return found

    graph = traced(nn.LSTM(6, 5, 2, batch_first=True), twice)
    first, second = ["zeros", "zeros", "lstm"] * 2 + ["cat", "cat"], ["slice", "slice", "lstm"] * 2
    assert calls(graph) == first + second
    joined = next(op for op in graph.operators if op.op == "aten.cat.default")
    assert graph.types[str(joined.results[0])].shape == (2, 4, 5)


def test_one_layer_is_left_as_it_is_and_draws_nothing() -> None:
    assert calls(traced(nn.RNN(6, 5, batch_first=True))) == ["zeros", "rnn_tanh"]


def test_no_dropout_where_nothing_trains() -> None:
    assert "dropout" not in calls(traced(nn.LSTM(6, 5, 2, batch_first=True, dropout=0.5).eval()))


def test_an_operator_of_several_layers_has_no_rule() -> None:
    graph = traced(nn.GRU(6, 5, batch_first=True))
    call = typed_call(graph, next(op for op in graph.operators if op.op in GATES))
    several = replace(call, arguments=(*call.arguments[:4], 2, *call.arguments[5:]))
    with pytest.raises(RuleError, match="layers have operators of their own"):
        RULES[call.op].build(several)
