"""What the worker processes do in the tests: every function here is called on all ranks at the same time."""

from functools import cache

import torch

import plans
from planner.plan.plan import Plan
from planner.sharding.mesh import Mesh
from runtime.step import TrainingStep, parallelize


@cache
def unsharded(model: str, micro_batches: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the plain model."""
    module = plans.build(model)
    inputs = plans.batch()
    loss = 0.0
    for part in zip(*(tensor.chunk(micro_batches) for tensor in inputs), strict=True):
        value = module(*part) / micro_batches
        value.backward()
        loss += float(value)
    return loss, {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def build_step(model: str, plan: Plan) -> TrainingStep:
    return parallelize(plans.build(model), plan, plans.batch(), traced=plans.traced(model))


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, relative to the largest magnitude; gradients that are zero but for rounding have a floor."""
    return float((found - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-3)


def parity(model: str, sizes: tuple[int, ...], seeds: list[int], micro_batches: int, recomputation: str) -> list[float]:
    """The worst error of loss and gradients under each random plan."""
    mesh: Mesh = plans.mesh_of(*sizes)
    loss, gradients = unsharded(model, micro_batches)
    errors = []
    for seed in seeds:
        plan = plans.random_plan(model, mesh, seed, micro_batches=micro_batches, recomputation=recomputation)
        step = build_step(model, plan)
        found = float(step.accumulate(*plans.batch()))
        whole = step.full_gradients()
        assert whole.keys() == gradients.keys()
        errors.append(max(abs(found - loss) / abs(loss), *(relative(whole[n], gradients[n]) for n in gradients)))
    return errors
