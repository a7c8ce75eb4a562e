"""Plans that are handed over as the text of plan files, each compared with the plain model: after one batch, and over
many steps."""

from functools import cache

import torch
from torch.utils import _pytree as pytree

from planner.plan.file import parse_plan
from planner.plan.plan import Training
from runtime.ops.randomness import dropping
from runtime.optimizers.optimizers import OptimizerSettings
from runtime.reference.unsharded import UnshardedStep
from tests.distributed import plans
from tests.distributed.tasks import SEED, build_step, worst_error

STEPS = 20
SETTINGS = OptimizerSettings(epsilon=1e-6)  # Adam divides rounding by epsilon


def parity(model: str, given: list[str]) -> list[float]:
    """The worst error of loss, gradients and changed buffers under each plan."""
    read = [parse_plan(text) for text in given]
    return [worst_error(build_step(model, plan), model, plan.training.micro_batches) for plan in read]


def training(model: str, given: list[str]) -> list[float]:
    """The worst error of the losses of 20 steps under each plan."""
    errors = []
    for plan in map(parse_plan, given):
        step = build_step(model, plan, SETTINGS)
        expected = plain_losses(model, plan.training)
        found = [step(*plans.inputs(model, seed=number)) for number in range(STEPS)]
        errors.append(max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)))
    return errors


@cache
def plain_losses(model: str, how: Training) -> list[float]:
    """The losses of 20 steps of the plain model, each on a batch of its own."""
    leaves = pytree.tree_leaves(plans.inputs(model))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    batched = frozenset(place for place, tensor in enumerate(tensors) if tensor.shape[:1] == (plans.BATCH,))
    plain = UnshardedStep(plans.build(model), how, SETTINGS, batched, dropping=dropping(plans.traced(model)), seed=SEED)
    return [plain(plans.inputs(model, seed=number), {}) for number in range(STEPS)]
