"""Operators whose results have no gradient (comparisons, detach, the place of the largest element) have no backward
pass: they take no time there, send nothing, and need no tensors."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.plan.binding.bind import BoundPlan, bind
from planner.plan.prediction.walk.walk import walks_of
from planner.pricing.liveness import liveness
from planner.sharding.discover import discover
from planner.sharding.layout import REPLICATE
from planner.sharding.mesh import Mesh
from planner.sharding.rule import Rule, Strategy, named_strategy
from tests.distributed import plans
from tests.unit.search.cases import cluster_of

SAMPLES = 4
UNGRADED = {"gt", "argmax", "detach"}


class Compared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
        x = self.rows(tokens_BS)
        x = x * (x > 0) + x.detach() + x.argmax(-1, keepdim=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets_BS.flatten())


@cache
def traced() -> OperatorGraph:
    tokens = torch.zeros(SAMPLES, 8, dtype=torch.int64)
    return discover(trace(Compared(), (tokens, tokens)))


def choose(name: str, rule: Rule, mesh: Mesh) -> Strategy:
    """What has no gradient is split along the samples, and reads what is whole."""
    factor = "d0" if name in UNGRADED else None
    return named_strategy(rule, (factor if factor in rule.index else None,), name)


def bound_of() -> BoundPlan:
    plan = plans.make_plan(
        "compared",
        plans.mesh_of(2),
        choose,
        plans.store_zero1,
        lambda name, shape, mesh: (REPLICATE,),
        graph=traced(),
        samples=SAMPLES,
    )
    return bind(plan, traced(), SAMPLES)


def test_what_has_no_gradient_takes_no_time_and_sends_nothing_backward() -> None:
    bound = bound_of()
    (walk, *_) = walks_of(bound, cluster_of("h100-80gb", 2))
    backward = {
        op.operator.name: float(walk.price(op, counted=False).backward[0])
        for op in bound.operators
        if any(bound.graph.differentiable.intersection(op.operator.operands))
    }
    assert backward.keys() >= UNGRADED
    assert {name for name, seconds in backward.items() if not seconds} >= UNGRADED
    assert backward["mul"] > 0
    phases = {(sent.owner, sent.phase) for sent in walk.rank(0).messages if sent.owner in UNGRADED}
    assert not {operator for operator, phase in phases if phase == "backward"}


def test_what_has_no_gradient_keeps_nothing() -> None:
    graph = bound_of().graph
    saved = dict(zip([op.name for op in graph.operators], liveness(graph).saved, strict=True))
    assert not any(saved[name] for name in UNGRADED)
    assert [graph.graded(op) for op in graph.operators if op.name in UNGRADED] == [(False,)] * 3
