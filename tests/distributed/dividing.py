"""Plans by hand in the ways in which people divide experts."""

from collections.abc import Callable, Sequence

from planner.plan.plan import Plan
from planner.sharding.layout import PARTIAL, REPLICATE, Placement, shard
from planner.sharding.mesh import Mesh
from planner.sharding.rule import Rule, Strategy, named_strategy
from planner.sharding.stored import StoredParameter
from tests.distributed import plans

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
        if rule.op_class == "experts":
            return named_strategy(rule, factors, name)
        of_experts = name.partition("/")[0].endswith("router") and len(rule.results[0]) == 1  # one number for each
        return (None,) * len(mesh.axes) if of_experts else others(name, rule, mesh)

    def store(name: str, shape: tuple[int, ...], mesh: Mesh) -> StoredParameter:
        return stored_experts(factors, name) if ".experts." in name else STORES[stored](name, shape, mesh)

    load = plans.load_megatron if stored == "megatron" else plans.load_samples
    return plans.make_plan(model, mesh, choose, store, load, **settings)  # type: ignore[arg-type]
