"""A batch size that the model's code computes with is refused where the plan's batch is another one."""

import pytest
import torch
from torch import nn

import runtime
from planner.errors import ModelError
from planner.graph.trace import trace
from planner.plan.plan import Plan
from planner.sharding.mesh import Mesh
from planner.sharding.rule import Rule, Strategy
from planner.sharding.stored import StoredParameter
from tests.distributed import plans
from tests.refusals import refused

WHOLE = StoredParameter(weight=(), gradient=(), state=())


class Scaled(nn.Module):
    def __init__(self, baked: bool) -> None:
        super().__init__()
        self.linear, self.baked = nn.Linear(8, 8), baked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.linear(x).square().mean()
        return loss * (x.shape[0] if self.baked else 4)


def plan_of(module: nn.Module, samples: int) -> Plan:
    """For plans.BATCH samples at once, traced with so many."""

    def alone(name: str, rule: Rule, mesh: Mesh) -> Strategy:
        return ()

    graph = trace(module, (torch.zeros(samples, 8),))
    return plans.make_plan(
        "scaled", plans.mesh_of(), alone, lambda *_: WHOLE, lambda *_: (), graph=graph, samples=samples
    )


def test_a_number_that_is_the_batch_size_is_refused() -> None:
    step = runtime.parallelize(Scaled(True), plan_of(Scaled(True), 2), device=torch.device("cpu"))
    with refused(ModelError, "mul", 4, 2):
        step(torch.ones(plans.BATCH, 8))


def test_a_number_that_is_not_stays() -> None:
    torch.manual_seed(0)
    module = Scaled(False)
    x = torch.randn(plans.BATCH, 8)
    wanted = float(module(x).detach())
    step = runtime.parallelize(module, plan_of(module, 2), device=torch.device("cpu"))
    assert step(x) == pytest.approx(wanted, rel=1e-5)
