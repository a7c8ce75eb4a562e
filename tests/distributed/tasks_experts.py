"""Models with experts, on all ranks at the same time."""

from dataclasses import replace

import torch

from planner.plan.plan import Plan
from runtime.optimizers.optimizers import OptimizerSettings
from runtime.reference.unsharded import UnshardedStep
from tests.distributed import plans, tasks
from tests.distributed.dividing import by_hand


def divided(
    model: str, ways: list[str], sizes: tuple[int, ...], stages: tuple[int, ...], parts: int, recomputation: str
) -> list[float]:
    """The worst error of loss, gradients and buffers of every way."""
    settings = {"stages": stages, "micro_batches": parts, "recomputation": recomputation, "kept": tasks.KEPT}
    return [
        tasks.worst_error(tasks.build_step(model, by_hand(way, model, plans.mesh_of(*sizes), **settings)), model, parts)
        for way in ways
    ]


def ungated(ways: list[str], sizes: tuple[int, ...], settings: dict[str, object]) -> list[float]:
    """The same of experts that have two matrices and the square of ReLU."""
    mesh, errors = plans.mesh_of(*sizes), []
    for way in ways:
        plan = by_hand(way, "ungated", mesh, kept=tasks.KEPT, **settings)
        errors.append(tasks.worst_error(tasks.build_step("ungated", plan), "ungated", plan.training.micro_batches))
    return errors


def sent_once(model: str, ways: list[str], sizes: tuple[int, ...], settings: dict[str, object]) -> list[float]:
    """The same where a token is sent once to each part of the outermost axis of an exchange."""
    errors = []
    for way in ways:
        plan = by_hand(way, model, plans.mesh_of(*sizes), kept=tasks.KEPT, **settings)
        plan = replace(plan, training=replace(plan.training, tokens_once=True))
        errors.append(tasks.worst_error(tasks.build_step(model, plan), model, plan.training.micro_batches))
    return errors


def trained(model: str, plan: Plan, steps: int = 3) -> float:
    """The worst error of losses, weights and buffers over some optimizer steps, against the plain model; biases of
    routers, which are integers, are the same."""
    settings = OptimizerSettings(learning_rate=1e-2)
    step = tasks.build_step(model, plan, settings)
    module = plans.build(model)
    plain = UnshardedStep(module, plan.training, settings, frozenset({0, 1}))
    worst = 0.0
    for number in range(steps):
        batch = plans.batch(seed=number)
        expected = plain(batch, {})
        worst = max(worst, abs(step(*batch) - expected) / expected)
    found, buffers = step.full_parameters(), dict(module.named_buffers())
    for name, content in step.changed_buffers().items():
        assert torch.equal(content, buffers[name]), (name, content, buffers[name])
        assert not name.endswith("bias_steps") or content.any(), name
    return max(worst, *(tasks.relative(found[name], w.detach()) for name, w in module.named_parameters()))


def balanced(sizes: tuple[int, ...], stages: tuple[int, ...], seeds: list[int], recomputation: str) -> list[float]:
    """Random plans of a model whose routers have biases and a loss."""
    mesh = plans.mesh_of(*sizes)
    settings = {"micro_batches": 2, "stages": stages, "recomputation": recomputation, "optimizer": "sgd"}
    return [trained("balanced", plans.random_plan("balanced", mesh, seed, **settings)) for seed in seeds]


def latent(model: str, ways: list[tuple[str, int]], sizes: tuple[int, ...], settings: dict[str, object]) -> list[float]:
    """The worst error of loss, gradients and buffers of every way and stage of ZeRO."""
    errors = []
    for way, zero in ways:
        plan = by_hand(way, model, plans.mesh_of(*sizes), zero=zero, kept=tasks.KEPT, **settings)
        errors.append(tasks.worst_error(tasks.build_step(model, plan), model, plan.training.micro_batches))
    return errors
