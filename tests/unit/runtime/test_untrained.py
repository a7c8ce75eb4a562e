"""Weights that the loss does not reach stay as they are, as under PyTorch's optimizers."""

import pytest
import torch
from torch import nn

import planner
import runtime
from runtime.reference.unsharded import UnshardedStep
from tests.unit.graph.test_untrained import Distilled

SETTINGS = runtime.OptimizerSettings(learning_rate=0.1, weight_decay=0.5)


def built() -> nn.Module:
    torch.manual_seed(0)
    return Distilled("no_grad")


@pytest.fixture(scope="module")
def plan() -> planner.Plan:
    graph = planner.trace(built(), args=(torch.randn(2, 4),), precision="fp32")
    return planner.search(graph, "cpu", devices=1, global_batch=4).plan


def trained_by_pytorch(batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    module = built()
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=0.1, betas=SETTINGS.betas, eps=SETTINGS.epsilon, weight_decay=0.5
    )
    for batch in batches:
        optimizer.zero_grad()
        module(batch).backward()
        optimizer.step()
    return dict(module.named_parameters())


def test_nothing_decays_that_gets_no_gradient(plan: planner.Plan) -> None:
    batches = [torch.randn(4, 4) for _ in range(3)]
    step = runtime.parallelize(built(), plan, optimizer=SETTINGS, example=(torch.randn(2, 4),))
    module = built()
    unsharded = UnshardedStep(module, plan.training, SETTINGS, frozenset({0}))
    for batch in batches:
        step(batch)
        unsharded((batch,), {})
    wanted = trained_by_pytorch(batches)
    for name, weight in built().named_parameters():
        assert torch.equal(wanted[name], weight) == (not name.startswith("student"))
    for found in (step.full_parameters(), dict(module.named_parameters())):
        for name, weight in wanted.items():
            torch.testing.assert_close(found[name].detach(), weight.detach())


def test_the_plan_has_states_of_what_is_trained_alone(plan: planner.Plan) -> None:
    student, elements = 4 * 4 + 4, 4
    assert dict(plan.prediction.memory)["optimizer state"] == 2 * elements * student
