"""Autograd functions of the user's as operators."""

import torch

from planner.graph.trace import resolve, trace
from planner.sharding.discover import discover
from planner.sharding.rules import rule_of
from tests.distributed.brought import OwnFunction, Steep


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


def test_the_same_function_is_the_same_operator_in_every_trace() -> None:
    names = [[op.op for op in trace(OwnFunction(), (torch.ones(samples, 8),)).operators] for samples in (2, 4)]
    assert names[0] == names[1]
