"""Parts of a block, by the names that Megatron-LM recomputes them by."""

from collections.abc import Mapping

PARTS: Mapping[str, tuple[str, ...]] = {
    "mla_up_proj": ("q_b_proj", "kv_b_proj"),
    "mlp": ("mlp", "c_fc", "gelu", "mlp_proj"),
    "moe": ("mlp",),
    "shared_experts": ("shared_expert",),
}
"""Modules and calls of a block by the names that Megatron-LM recomputes them by; "moe" is the MLP of a block with
experts, "mlp" that of one without."""


def parts_of(name: str, sparse: bool) -> frozenset[str]:
    """The parts that an operator is inside of; `sparse` says whether its block has experts."""
    modules = set(name.replace("/", ".").split("."))
    other = "mlp" if sparse else "moe"
    return frozenset(part for part, names in PARTS.items() if part != other and modules & set(names))
