"""What the worker processes do where states are offloaded: the same training with and without."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from hardware_profiles import Home
from planner.plan.plan import Plan
from planner.sharding.update import Update
from runtime.optimizers.optimizers import OptimizerSettings
from runtime.step.training_step import TrainingStep
from tests.distributed import plans
from tests.distributed.offloading import homes_of, of_blocks, offloaded, staying
from tests.distributed.tasks import build_step, plan_of, relative

STEPS = 3


def same_training(
    model: str,
    kind: int | str,
    sizes: tuple[int, ...],
    home: str,
    settings: Mapping[str, object],
    update: Update,
    activations: Home = "device",
    weights: tuple[Home, str] | None = None,
    saved: Home = "device",
) -> tuple[float, int, int]:
    """Largest difference of losses and weights after some steps with states and activations offloaded, and the
    `weights` of blocks where a home is given and which of them, relatively; bytes outside of the device; and bytes of
    states that are on it."""
    plan = plan_of(model, plans.mesh_of(*sizes), kind, **settings)
    plan = replace(plan, training=replace(plan.training, update=update))
    plain_losses, plain, _ = _trained(model, plan)
    away = staying if weights is None else of_blocks(*weights)
    losses, found, step = _trained(model, offloaded(plan, homes_of(home), activations, away, saved))
    worst = max(relative(found[name].double(), plain[name].double()) for name in plain)
    differ = max(abs(one - other) / abs(other) for one, other in zip(losses, plain_losses, strict=True))
    optimizer = step.rank.optimizer
    outside = sum(row.nbytes for row in (*optimizer.rows, *step.rank.weights.rows))
    outside += 0 if step.rank.activations is None else step.rank.activations.nbytes
    return max(worst, differ), outside, sum(state.untyped_storage().nbytes() for state in optimizer.states())


def _trained(model: str, plan: Plan) -> tuple[list[float], dict[str, torch.Tensor], TrainingStep]:
    step = build_step(model, plan, OptimizerSettings(learning_rate=1e-2))
    step.optimizer.settings = replace(step.optimizer.settings, learning_rate=1e-2)
    samples = plan.training.global_batch
    losses = [step(*plans.inputs(model, seed=number, samples=samples)) for number in range(STEPS)]
    return losses, step.full_parameters(), step
