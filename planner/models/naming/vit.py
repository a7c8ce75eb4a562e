"""ViT's names: `ViTForImageClassification`, with a projection for each of queries, keys and values.

Version 5 of transformers calls its modules otherwise than the files that it reads and writes; a model that was built
from a `config.json` has the names of those modules.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from planner.models.naming.parts import Built, Naming, Part, rows
from planner.models.naming.rules import parts_of, rule
from planner.models.vit import ViTConfig

_KINDS = ("query", "key", "value")
_THERE = r"vit.encoder.layer.\1."
_TYPES, _BASE = ("vit",), "vit."
_UNUSED = (r"vit\.pooler\..*",)


def vit_naming(config: ViTConfig, built: Built) -> Naming:
    """What transformers calls the tensors of a vision transformer."""

    def fused(ours: str, theirs: str, shape: tuple[int, ...]) -> Iterator[Part]:
        size = config.hidden_size // config.num_heads
        for head in range(config.num_heads):
            for number, kind in enumerate(_KINDS):
                yield rows(ours, theirs.format(kind), shape, (3 * head + number) * size, head * size, size)

    block = r"blocks\.(\d+)\."
    parts, _ = parts_of(
        built,
        (
            rule(r"patches\.(\w+)", r"vit.embeddings.patch_embeddings.projection.\1"),
            rule("class_token", "vit.embeddings.cls_token"),
            rule("positions", "vit.embeddings.position_embeddings"),
            rule(block + r"ln_1\.(\w+)", _THERE + r"layernorm_before.\2"),
            rule(block + r"ln_2\.(\w+)", _THERE + r"layernorm_after.\2"),
            rule(block + r"qkv\.(\w+)", _THERE + r"attention.attention.{}.\2", fused),
            rule(block + r"attn_proj\.(\w+)", _THERE + r"attention.output.dense.\2"),
            rule(block + r"mlp_up\.(\w+)", _THERE + r"intermediate.dense.\2"),
            rule(block + r"mlp_down\.(\w+)", _THERE + r"output.dense.\2"),
            rule(r"norm\.(\w+)", r"vit.layernorm.\1"),
            rule(r"head\.(\w+)", r"classifier.\1"),
        ),
    )
    return Naming(parts=parts, config=_config(config), model_types=_TYPES, base=_BASE, unused=_UNUSED)


def vit_of_config_naming(content: Mapping[str, Any] | None, built: Built) -> Naming:
    """The same of a model that transformers itself has built."""
    block = r"vit\.layers\.(\d+)\."
    parts, _ = parts_of(
        built,
        (
            rule(block + r"attention\.q_proj\.(\w+)", _THERE + r"attention.attention.query.\2"),
            rule(block + r"attention\.k_proj\.(\w+)", _THERE + r"attention.attention.key.\2"),
            rule(block + r"attention\.v_proj\.(\w+)", _THERE + r"attention.attention.value.\2"),
            rule(block + r"attention\.o_proj\.(\w+)", _THERE + r"attention.output.dense.\2"),
            rule(block + r"mlp\.fc1\.(\w+)", _THERE + r"intermediate.dense.\2"),
            rule(block + r"mlp\.fc2\.(\w+)", _THERE + r"output.dense.\2"),
            rule(block + r"(.*)", _THERE + r"\2"),
            rule(r"(.*)", r"\1"),
        ),
    )
    return Naming(parts=parts, config=content, model_types=_TYPES, base=_BASE, unused=_UNUSED)


def _config(config: ViTConfig) -> dict[str, Any]:
    labels = {str(number): f"LABEL_{number}" for number in range(config.num_classes)}
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "attention_probs_dropout_prob": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "hidden_size": config.hidden_size,
        "id2label": labels,
        "image_size": config.image_size,
        "intermediate_size": config.ffn_size,
        "label2id": {label: int(number) for number, label in labels.items()},
        "layer_norm_eps": config.norm_epsilon,
        "num_attention_heads": config.num_heads,
        "num_channels": config.channels,
        "num_hidden_layers": config.num_layers,
        "patch_size": config.patch_size,
        "qkv_bias": True,
    }
