"""The training step on one device: the whole path without communication, and what it refuses."""

import errno
import gc
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import runtime
from planner.errors import ModelError, PlanFileError, RequestError
from planner.graph.trace import trace
from planner.plan.binding.bind import prepare
from planner.plan.file import save_plan
from planner.plan.outline import model_reference
from planner.plan.plan import ClusterReference, Group, Plan, Prediction, Provenance, Stage, Training
from planner.sharding.mesh import Mesh
from planner.sharding.stored import StoredParameter
from runtime.data.datasets import synthetic_batch
from runtime.optimizers.optimizers import make_optimizer
from tests.refusals import refused

CPU = torch.device("cpu")


class Tower(nn.Module):
    """Four equal blocks, so that there is something to recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + self.shift
        return (x - y).pow(2).mean()


def build() -> Tower:
    torch.manual_seed(0)
    return Tower()


def batch(samples: int = 4) -> list[torch.Tensor]:
    examples = [torch.zeros(2, 8), torch.zeros(2, 8)]
    return synthetic_batch(examples, batch=2, samples=samples, bounds=(None,) * len(examples), seed=1, step=0)


def plan(module: nn.Module | None = None) -> Plan:
    graph = trace(module or build(), tuple(batch(2)))
    prepared, blocks = prepare(graph)
    whole = StoredParameter(weight=(), gradient=(), state=())
    inside = [blocks.block_of(index) == 0 for index in range(len(prepared.operators))]
    outside = [blocks.block_of(index) is None for index in range(len(prepared.operators))]
    blocks_group = ()
    if blocks.count:
        first = tuple((name, ()) for name in _names(prepared, inside))
        blocks_group = (
            Group(name="blocks", blocks=blocks.count, recomputation="full", operators=first, parameters=()),
        )
    return Plan(
        model=model_reference(graph, name="tower", sequence_length=None, batch=2),
        training=Training(global_batch=4, micro_batches=2, precision="fp32", optimizer="adamw"),
        cluster=ClusterReference(profile="cpu", digest="", devices=1),
        mesh=Mesh(axes=()),
        stages=(Stage(first_block=0, blocks=blocks.count),),
        schedule="1f1b",
        inputs=tuple((name, ()) for name in graph.inputs),
        groups=(
            Group(
                name="outside",
                operators=tuple((name, ()) for name in _names(prepared, outside)),
                parameters=tuple((p.name, whole) for p in prepared.parameters),
            ),
            *blocks_group,
        ),
        prediction=Prediction(
            step_seconds=1.0, objective_seconds=1.0, peak_bytes=1.0, capacity_bytes=1.0, model_flops=0.0,
            model_flops_utilisation=0.0, samples_per_second=0.0, time=(), memory=(),
        ),
        provenance=Provenance(planner="test", search="none", status="feasible", gap=0.0),
    )  # fmt: skip


def _names(graph, chosen: list[bool]) -> list[str]:
    return [op.name for op, wanted in zip(graph.operators, chosen, strict=True) if wanted]


def test_one_device_trains_like_the_plain_module() -> None:
    step = runtime.parallelize(build(), plan(), example=batch(2), device=CPU)
    assert any(section.segment.recomputed for section in step.rank.executors[0].sections)
    module = build()
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(3):
        loss = module(*batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert step(*batch()) == pytest.approx(float(loss.detach()), rel=1e-6)
    for name, weight in step.full_parameters().items():
        torch.testing.assert_close(weight, module.get_parameter(name).detach(), rtol=1e-5, atol=1e-7)


def test_fewer_samples_than_the_model_was_traced_with() -> None:
    one = replace(plan(), training=replace(plan().training, global_batch=1, micro_batches=1))
    step = runtime.parallelize(build(), one, device=CPU)
    x, y = batch(1)
    assert step(x, y) == pytest.approx(float(build()(x, y).detach()), rel=1e-6)


def test_the_weights_of_the_module_are_copied() -> None:
    module = build()
    before = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    runtime.parallelize(module, plan(), device=CPU)(*batch())
    assert all(torch.equal(before[name], weight) for name, weight in module.named_parameters())


@pytest.mark.thorough
def test_a_step_does_not_keep_the_module() -> None:
    module = build()
    gone = weakref.ref(module)
    step = runtime.parallelize(module, plan(), example=batch(), device=CPU)
    del module
    gc.collect()
    assert gone() is None
    step(batch())


def test_gradients_of_the_micro_batches_add_up() -> None:
    step = runtime.parallelize(build(), plan(), device=CPU)
    module = build()
    module(*batch()).backward()
    step.accumulate(*batch())
    for name, gradient in step.full_gradients().items():
        torch.testing.assert_close(gradient, module.get_parameter(name).grad)


def test_a_frozen_parameter_stays() -> None:
    module = build()
    module.blocks[0].requires_grad_(False)
    step = runtime.parallelize(module, plan(module), device=CPU)
    step(*batch())
    assert torch.equal(step.full_parameters()["blocks.0.weight"], module.blocks[0].weight)
    assert not torch.equal(step.full_parameters()["blocks.1.weight"], module.blocks[1].weight)
    assert "blocks.0.weight" not in step.full_gradients()


def test_weights_on_meta_are_refused() -> None:
    with refused(ModelError, "blocks.0.weight", "meta"):
        runtime.parallelize(build().to("meta"), plan(), example=batch(), device=CPU)


def test_another_batch_is_refused() -> None:
    step = runtime.parallelize(build(), plan(), device=CPU)
    with refused(RequestError, "(6, 8)", "(4, 8)"):
        step(*batch(6))
    with refused(RequestError, "args_1", "float64", "float32"):
        step(batch()[0], batch()[1].double())
    with refused(RequestError, "Tower.forward", "y"):
        step(batch()[0])


@pytest.mark.slow
@pytest.mark.thorough
def test_the_learning_rate_may_change_between_steps() -> None:
    def weights(*rates: Any) -> torch.Tensor:
        step = runtime.parallelize(build(), plan(), optimizer=runtime.OptimizerSettings(learning_rate=0.1), device=CPU)
        for rate in rates:
            step.optimizer.learning_rate = rate
            step(*batch())
        return step.full_parameters()["blocks.0.weight"]

    assert torch.equal(weights(0.1, 0.02), weights(*[lambda number: [0.1, 0.02][number]] * 2))
    assert torch.equal(weights(0.0), build().blocks[0].weight)
    assert not torch.equal(weights(0.1, 0.02), weights(0.1, 0.1))
    with refused(RequestError, "step 1", -1.0, 0):
        weights(-1.0)


@pytest.mark.parametrize(
    "rate", ["fast", None, -1.0, float("nan"), pytest.param(lambda number: "0.1", id="function")], ids=repr
)
def test_a_rate_that_is_no_number_stops_before_the_step(rate: Any) -> None:
    step = runtime.parallelize(build(), plan(), device=CPU)
    step.optimizer.learning_rate = rate
    with refused(RequestError, "step 1", 0):
        step(*batch())
    step.optimizer.learning_rate = torch.tensor(0.1)  # nothing was aborted
    assert step(*batch()) > 0


def test_arguments_of_another_type_are_refused() -> None:
    wrong: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
        ({"model": build}, ("function", "nn.Module")),
        ({"plan": {}}, ("dict", "plan file")),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, ("SGD", "runtime.OptimizerSettings", "--optimizer")),
    )
    for given, facts in wrong:
        with refused(RequestError, *facts):
            runtime.parallelize(**({"model": build(), "plan": plan(), "device": CPU} | given))


def test_a_plan_is_read_from_its_file(tmp_path: Path) -> None:
    save_plan(plan(), tmp_path / "plan.json")
    step = runtime.parallelize(build(), tmp_path / "plan.json", example=batch(6), device=CPU)
    assert step(batch()) == runtime.parallelize(build(), plan(), device=CPU)({"y": batch()[1], "x": batch()[0]})
    with refused(PlanFileError, tmp_path / "none.json", os.strerror(errno.ENOENT)):
        runtime.parallelize(build(), tmp_path / "none.json", device=CPU)


def test_an_unknown_optimizer_is_refused() -> None:
    with refused(RequestError, "adam", "adamw", "lamb"):
        make_optimizer("adam", [], runtime.OptimizerSettings())


def test_synthetic_numbers_are_probabilities_where_the_example_has_some() -> None:
    labels, chances = torch.tensor([0.0, 1.0]), torch.tensor([0.2, 0.7])
    others = torch.tensor([0.0, 2.0]), torch.ones(2), torch.empty(2, device="meta")
    examples = (labels, chances, *others)
    drawn = synthetic_batch(examples, batch=2, samples=500, bounds=(None,) * 5, seed=0, step=0)
    assert set(drawn[0].tolist()) == {0.0, 1.0}
    assert 0 <= drawn[1].min() < 0.1 < 0.9 < drawn[1].max() <= 1
    assert all(found.min() < -1 and found.max() > 1 for found in drawn[2:])


def test_synthetic_batches_depend_on_seed_and_step_only() -> None:
    def draw(seed: int, step: int) -> list[torch.Tensor]:
        examples = [torch.zeros(2, 3, dtype=torch.int64), torch.zeros(5), torch.tensor([4, 9])]
        return synthetic_batch(examples, batch=2, samples=6, bounds=(7,) * len(examples), seed=seed, step=step)

    tokens, positions, _ = draw(0, 0)
    assert (tokens.shape, positions.shape) == ((6, 3), (5,))
    assert tokens.max() < 7
    assert all(torch.equal(a, b) for a, b in zip(draw(0, 0), draw(0, 0), strict=True))
    assert not torch.equal(draw(0, 1)[1], positions)
    assert not torch.equal(draw(1, 0)[1], positions)


def test_integers_without_a_bound_come_from_the_example() -> None:
    (values,) = synthetic_batch([torch.tensor([4, 9])], batch=2, samples=50, bounds=(None,), seed=0, step=0)
    assert set(values.tolist()) == {4, 9}


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import runtime, runtime.launch.launch, sys; print('torch' in sys.modules, sorted(runtime.__all__))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = [
        "BatchLoader",
        "Checkpoints",
        "Groups",
        "GuardSettings",
        "OptimizerSettings",
        "StageAudit",
        "TokensDataset",
        "TrainingStep",
        "audit",
        "get_group",
    ]
    names += ["get_group_size", "get_rank", "loader", "parallelize"]
    assert done.stdout == f"False {names}\n"
