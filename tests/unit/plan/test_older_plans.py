"""Plans of an earlier graph of the same model: they name operators that this version does not need."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import planner
from planner.errors import PlanFileError
from planner.graph.trace import trace
from planner.plan.binding.bind import bind
from tests.refusals import refused


class Written(nn.Module):
    """What it computes is added to zeros of its shape, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        zeros = torch.zeros_like(x)
        return ((x + zeros) * (zeros + 1)).mean()


@pytest.mark.parametrize("of", ["zeros_like", "layer/linear"])
def test_an_identity_of_zeros_may_be_named(of: str) -> None:
    """Zeros in the shape of a tensor were thought to have a gradient, so that two readers shared an identity."""
    x = torch.empty(8, 16)
    graph = trace(Written(), (x,))
    plan = planner.search(Written(), "cpu", args=(x,), devices=2, global_batch=8, precision="fp32").plan
    (group,) = (one for one in plan.groups if of in dict(one.operators))
    name = f"{of}/again/shared" if of == "layer/linear" else f"{of}/shared"
    older = replace(group, operators=(*group.operators, (name, dict(group.operators)[of])))
    older_plan = replace(plan, groups=tuple(older if one is group else one for one in plan.groups))
    if of == "zeros_like":
        assert bind(older_plan, graph, 8).operators == bind(plan, graph, 8).operators
    else:
        with refused(PlanFileError, "unknown operator", name):
            bind(older_plan, graph, 8)
