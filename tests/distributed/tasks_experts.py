"""Models with experts, on all ranks at the same time: plans by hand in the ways in which people divide experts."""

from collections.abc import Callable, Sequence

import plans
import tasks
import torch

from planner.plan.plan import Plan
from planner.sharding.layout import PARTIAL, REPLICATE, Placement, shard
from planner.sharding.mesh import Mesh
from planner.sharding.rule import Rule, Strategy, named_strategy
from planner.sharding.stored import StoredParameter
from runtime.optimizers import OptimizerSettings
from runtime.unsharded import UnshardedStep

WAYS: dict[str, tuple[tuple[str, str], Callable[[str, Rule, Mesh], Strategy], str]] = {
    "samples": (("e@b", "e@b"), plans.on_samples, "zero1"),
    "zero3": (("e@b", "b"), plans.on_samples, "zero3"),
    "tensor inside": (("e@b", "f"), plans.megatron, "megatron"),
    "folded": (("e@b", "e@s"), plans.megatron, "megatron"),
    "folded samples": (("b", "e@b"), plans.megatron, "megatron"),
    "alone": (("b", "e"), plans.megatron, "megatron"),
    "alone and exchanged": (("e", "e@b"), plans.megatron, "megatron"),
}
"""The factors of experts on two axes, how all else is divided, and how its weights are stored."""

STORES = {"zero1": plans.store_zero1, "zero3": plans.store_zero3, "megatron": plans.store_megatron}


def stored_experts(factors: Sequence[str], name: str) -> StoredParameter:
    """Weights of experts as they are used; one sum a step where all devices of an axis have the same."""
    width = 2 if "down_proj" in name else 1
    cuts: list[Placement] = [
        shard(0) if factor.startswith("e") else shard(width) if factor == "f" else REPLICATE for factor in factors
    ]
    gradient = tuple(PARTIAL if cut == REPLICATE else cut for cut in cuts)
    return StoredParameter(weight=tuple(cuts), gradient=gradient, state=tuple(cuts))


def by_hand(way: str, model: str, mesh: Mesh, **settings: object) -> Plan:
    factors, others, stored = WAYS[way]

    def choose(name: str, rule: Rule, mesh: Mesh) -> Strategy:
        return named_strategy(rule, factors, name) if rule.op_class == "experts" else others(name, rule, mesh)

    def store(name: str, shape: tuple[int, ...], mesh: Mesh) -> StoredParameter:
        return stored_experts(factors, name) if ".experts." in name else STORES[stored](name, shape, mesh)

    load = plans.load_megatron if stored == "megatron" else plans.load_samples
    return plans.make_plan(model, mesh, choose, store, load, **settings)  # type: ignore[arg-type]


def divided(
    model: str, ways: list[str], sizes: tuple[int, ...], stages: tuple[int, ...], parts: int, recomputation: str
) -> list[float]:
    """The worst error of loss, gradients and buffers of every way."""
    settings = {"stages": stages, "micro_batches": parts, "recomputation": recomputation, "kept": tasks.KEPT}
    return [
        tasks.worst_error(tasks.build_step(model, by_hand(way, model, plans.mesh_of(*sizes), **settings)), model, parts)
        for way in ways
    ]


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
