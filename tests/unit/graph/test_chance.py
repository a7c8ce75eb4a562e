"""Operators that draw random numbers are known, or refused where the model is traced."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hardware_profiles import load_software
from planner.errors import ModelError
from planner.graph.fused_dropout import with_fused_dropout
from planner.graph.operator_graph import OperatorGraph
from planner.graph.random_ops import CHANCES, dropping_attention
from planner.graph.trace import trace
from planner.sharding.rule import Rule
from planner.sharding.rules import rule_of
from tests.refusals import refused


class Calls(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner = Inner(function)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sum()


class Inner(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight)


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: x + torch.rand_like(x), "aten.rand_like.default"),
        (lambda x: x + torch.randn(8), "aten.randn.default"),
        (lambda x: x * torch.bernoulli(torch.sigmoid(x)), "aten.bernoulli.default"),
        (lambda x: F.alpha_dropout(x, 0.1, training=True), "aten.alpha_dropout.default"),
        (lambda x: x * torch.ones_like(x).bernoulli_(1.0), "aten.bernoulli.p"),
        (lambda x: x * torch.ones_like(x).bernoulli_(0.9, generator=torch.Generator()), "aten.bernoulli.p"),
    ],
)
def test_what_cannot_be_drawn_alike_is_refused_with_its_line(
    function: Callable[[torch.Tensor], torch.Tensor], op: str
) -> None:
    line = Inner.forward.__code__.co_firstlineno + 1
    with refused(ModelError, op, "inner", f"test_chance.py:{line}"):
        trace(Calls(function), (torch.ones(4, 8),))


@pytest.mark.parametrize(
    ("function", "probability"),
    [
        (lambda x: F.dropout(x, 0.3), 0.3),
        (lambda x: F.dropout(x, 0.3, training=False), 0.0),
        (lambda x: F.dropout(x, 0.0), 0.0),
        (lambda x: F.dropout2d(x.unflatten(1, (2, 2, 2)), 0.2), 0.2),
        (lambda x: torch.native_dropout(x, 0.3, True)[0], 0.3),
        (lambda x: torch.native_dropout(x, 0.3, None)[0], 0.3),
        (lambda x: torch.native_dropout(x, 0.3, False)[0], 0.0),
    ],
)
def test_probabilities_of_calls(function: Callable[[torch.Tensor], torch.Tensor], probability: float) -> None:
    graph = trace(Calls(function), (torch.ones(4, 8),))
    (op,) = (op for op in graph.operators if op.op in CHANCES)
    assert CHANCES[op.op].of(op.arguments, dict(op.keywords)) == probability


class Attends(nn.Module):
    def __init__(self, *chances: float) -> None:
        super().__init__()
        self.weight, self.chances = nn.Parameter(torch.ones(4)), chances

    def forward(self, x_BHTD: torch.Tensor) -> torch.Tensor:
        x_BHTD = x_BHTD * self.weight
        for chance in self.chances:
            x_BHTD = F.scaled_dot_product_attention(x_BHTD, x_BHTD, x_BHTD, dropout_p=chance, is_causal=True)
        return x_BHTD.sum()


def test_attention_that_drops_is_said() -> None:
    x_BHTD = (torch.zeros(2, 2, 4, 4),)
    assert dropping_attention(trace(Attends(0.0), x_BHTD).operators) is None
    said = dropping_attention(trace(Attends(0.0, 0.1, 0.1), x_BHTD).operators)
    assert said is not None
    assert said.startswith("2 of 3 attention operators drop 10% of their probabilities: their scores are in memory")


def test_attention_that_drops_in_one_kernel_is_said_where_it_has_no_price() -> None:
    operators = trace(Attends(0.1), (torch.zeros(2, 2, 4, 4),)).operators
    assert dropping_attention(operators, fused=True) is None
    said = dropping_attention(operators, fused=True, priced=False)
    assert said is not None
    assert "no figure is known" in said


def test_what_attention_that_drops_keeps_depends_on_the_software() -> None:
    """Fused attention keeps its result and four bytes for each query; scores in memory are halved by no causal mask."""
    graph, plain = (trace(Attends(p), (torch.zeros(2, 2, 4, 4),)) for p in (0.1, 0.0))
    fused = with_fused_dropout(graph, fused=True)
    assert with_fused_dropout(graph, fused=False) is graph is with_fused_dropout(fused, fused=False)
    assert with_fused_dropout(plain, fused=True) is plain
    assert fused is with_fused_dropout(graph, fused=True)
    assert fused.fingerprint() == graph.fingerprint()
    one, other, without = (_attention_rule(each) for each in (graph, fused, plain))
    assert (one.unfused, one.drops, one.causal, one.saved_results) == (True, False, True, ())
    assert (other.unfused, other.drops, other.causal, other.saved_results) == (False, True, True, (0,))
    assert (other.work, other.saved_extra, other.scratch) == (without.work, without.saved_extra, without.scratch)
    assert other.inner == ()  # no ring: which elements are dropped is decided by their places


def _attention_rule(graph: OperatorGraph) -> Rule:
    return next(rule for op in graph.operators if (rule := rule_of(graph, op)).op_class == "attention")


@pytest.mark.parametrize(("software", "fused"), [("pytorch", False), ("megatron", True), ("megatron-2021", False)])
def test_software_drops_probabilities_in_one_kernel_or_does_not(software: str, fused: bool) -> None:
    assert load_software(software).drops_fused == fused
