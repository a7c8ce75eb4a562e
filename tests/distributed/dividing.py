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
    "zero2": (("e@b", "b"), plans.on_samples, "zero2"),
}
"""The factors of experts on two axes, how all else is divided, and how its weights are stored."""

STORES = {
    "zero1": plans.store_zero1,
    "zero2": plans.store_zero2,
    "zero3": plans.store_zero3,
    "megatron": plans.store_megatron,
}
WHOLE = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight", "gate.weight")
"""Weights of DeepSeek that every tensor parallel device needs whole: those of latent vectors, and of routers."""


def stored_experts(factors: Sequence[str], name: str, zero: int = 0) -> StoredParameter:
    """Weights of experts as they are used; one sum a step where all devices of an axis have the same."""
    width = 2 if "down_proj" in name else 1
    cuts: list[Placement] = [
        shard(0) if factor.startswith("e") else shard(width) if factor == "f" else REPLICATE for factor in factors
    ]
    return sharded(tuple(cuts), zero)


def sharded(cuts: tuple[Placement, ...], zero: int) -> StoredParameter:
    """A weight that is cut so; where axes have copies, ZeRO 1 cuts their states, and 2 their gradients too."""

    def copies(placement: Placement) -> tuple[Placement, ...]:
        return tuple(placement if cut == REPLICATE else cut for cut in cuts)

    gradient = copies(shard(0) if zero == 2 else PARTIAL)
    return StoredParameter(weight=cuts, gradient=gradient, state=copies(shard(0) if zero else REPLICATE))


def latent(name: str, rule: Rule, mesh: Mesh) -> Strategy:
    """Samples on the first axis of a DeepSeek; heads, hidden units of MLPs and the vocabulary on the second. Latent
    vectors, the part of keys that all heads share and routers are the same on all devices of the second."""
    place, _, call = name.partition("/")
    tensor = None
    if place.endswith("self_attn"):
        outer = ("view", "view_2", "transpose", "transpose_2", "clone", "_unsafe_view")
        of_sequence = ("split_with_sizes_2", "unsqueeze")
        heads = "d2" if call in outer else "g" if "g" in rule.index else "d1"
        tensor = heads if heads in rule.index and call not in of_sequence else None
    elif place.endswith(("q_b_proj", "q_proj", "kv_b_proj", "gate_proj", "up_proj", "lm_head")):
        tensor = "o"
    elif place.endswith(("o_proj", "down_proj")):
        tensor = "i"
    elif name == "view" or (place.endswith(("mlp", "shared_expert")) and call in ("silu", "mul")):
        tensor = "d2"
    elif name.endswith("post_attention_layernorm/rms_norm/shared"):
        tensor = "copies"
    elif "v" in rule.index and "gather" not in call:
        tensor = "v"
    return named_strategy(rule, (plans.sample_factor(rule), tensor), name)


def store_latent(name: str, shape: tuple[int, ...], zero: int) -> StoredParameter:
    """A weight of a DeepSeek as `latent` uses it."""
    cut = plans.store_megatron(name, shape, plans.mesh_of(1, 1)).weight[1]
    return sharded((REPLICATE, REPLICATE if name.endswith(WHOLE) else cut), zero)


def by_hand(way: str, model: str, mesh: Mesh, *, zero: int = 0, **settings: object) -> Plan:
    """A plan in one of the `WAYS`; of a DeepSeek with tensor parallelism also with ZeRO on the first axis."""
    factors, others, stored = WAYS[way]
    of_latent = model.startswith("deepseek") and stored == "megatron"

    def choose(name: str, rule: Rule, mesh: Mesh) -> Strategy:
        if rule.op_class == "experts":
            return named_strategy(rule, factors, name)
        of_experts = name.partition("/")[0].endswith("router") and len(rule.results[0]) == 1  # one number for each
        return (None,) * len(mesh.axes) if of_experts else (latent if of_latent else others)(name, rule, mesh)

    def store(name: str, shape: tuple[int, ...], mesh: Mesh) -> StoredParameter:
        if ".experts." in name:
            return stored_experts(factors, name, zero)
        return store_latent(name, shape, zero) if of_latent else STORES[stored](name, shape, mesh)

    load = plans.load_megatron if stored == "megatron" else plans.load_samples
    return plans.make_plan(model, mesh, choose, store, load, **settings)  # type: ignore[arg-type]
