"""Autograd functions of the user's as operators."""

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from planner.errors import ModelError
from planner.graph.torch_operators import resolve
from planner.graph.trace import trace
from planner.sharding.discover import discover
from planner.sharding.rules import rule_of
from tests.distributed.brought import OwnFunction, Steep
from tests.refusals import refused


def test_a_call_is_one_operator_whose_backward_pass_is_its_own() -> None:
    graph = discover(trace(OwnFunction(), (torch.ones(4, 8),)))
    (op,) = (op for op in graph.operators if op.op.startswith("own."))
    assert op.op.startswith("own.tests_distributed_brought_Steep.v")
    rule = rule_of(graph, op)
    assert [factor.kind.value for factor in rule.factors] == ["parallel", "parallel"]
    x = torch.randn(3, 5, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    resolve(op.op)(x, 1.5).sum().backward()
    Steep.apply(y, 1.5).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(x.grad, y.grad)


def scaled_by(scale: float) -> Any:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x * scale

        @staticmethod
        def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] * scale

    return Scaled


class Scaling(nn.Module):
    def __init__(self, *functions: Any) -> None:
        super().__init__()
        self.functions = functions
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        for function in self.functions:
            x = function.apply(x)
        return x.sum()


def test_functions_that_differ_in_what_is_around_them_are_not_taken_for_each_other() -> None:
    """Two of one name would both run as the last: in one model, or in one that another was traced before."""
    double = scaled_by(2.0)
    trace(Scaling(double, double), (torch.ones(4, 8),))
    trace(Scaling(scaled_by(2.0)), (torch.ones(4, 8),))  # built again
    for functions in ((scaled_by(2.0), scaled_by(2.0)), (scaled_by(3.0),)):
        with pytest.raises(ModelError, match="has the name of another one"):
            trace(Scaling(*functions), (torch.ones(4, 8),))


def test_the_same_function_is_the_same_operator_in_every_trace() -> None:
    names = [[op.op for op in trace(OwnFunction(), (torch.ones(samples, 8),)).operators] for samples in (2, 4)]
    assert names[0] == names[1]


def test_one_that_was_not_traced_here_is_refused_with_what_to_give() -> None:
    with refused(ModelError, "own.elsewhere_Steep.v01", "autograd.Function", "--model package.module:factory"):
        resolve("own.elsewhere_Steep.v01")


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.outer, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 4), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            torch.utils.checkpoint.checkpoint(self.inner, self.outer(x), use_reentrant=self.reentrant).square().mean()
        )


def test_what_is_checkpointed_is_trained_either_way() -> None:
    """The reentrant way calls it where gradients are switched off."""
    either, other = (trace(Checkpointed(reentrant), (torch.ones(2, 4),)) for reentrant in (True, False))
    assert all(parameter.trainable for parameter in either.parameters)
    assert [op.op for op in either.operators] == [op.op for op in other.operators]
    assert either.differentiable == other.differentiable
