"""The smallest model of the same make: fewer layers and smaller dims, with every switch unchanged.

A dim becomes a small multiple of a `unit`, which every product of axes of a small mesh divides. No two dims of
different meaning become equal, so that a graph of the small model tells them apart as that of the large model does.
Settings for the structure of a model stay: whether embeddings are tied, whether heads share keys (all heads, groups of
them, or none), whether queries have a rank, whether experts are grouped.

    llama70b, 4 layers, unit 2   ->   llama70b+ffn_size=48+head_size=...+hidden_size=32+num_heads=4+num_kv_heads=2+...

Models of vision and of clicks keep their layers; only sizes without influence on structure shrink: images, tables.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from planner.errors import RequestError
from planner.models.overrides import changed_reference, looks_like_config

_HEAD = 8
"""Dim of a head; rotary positions want an even one."""
_EXPERTS, _CHOSEN, _GROUPS = 8, 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """Layers of a model, of which the first `dense` have an MLP and the others experts (0 where all are alike)."""

    layers: int
    dense: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallerModel:
    """The name of the smaller model, and the tokens of its samples (None: no sequences)."""

    reference: str
    sequence_length: int | None


def depth_of(reference: str, sequence_length: int | None) -> Depth | None:
    """How deep a model is; None where its layers are not numbered by one dimension."""
    sizes = _sizes(reference, sequence_length)
    layers = next((sizes[key] for key in _LAYERS if isinstance(sizes.get(key), int)), None)
    if layers is None:
        return None
    dense = next((sizes[key] for key in _DENSE if isinstance(sizes.get(key), int)), 0)
    return Depth(layers=layers, dense=dense)


def smaller_model(reference: str, sequence_length: int | None, depth: Depth | None, unit: int) -> SmallerModel:
    """The model with `depth` layers (None: as many as it has) whose dims are small multiples of `unit`.

    Raises RequestError for a model that a factory builds, whose dims cannot be changed from outside.
    """
    sizes = _sizes(reference, sequence_length)
    changes: dict[str, int | str] = {}
    for keys, small in _RULES:
        changes.update((key, small(sizes, key, unit)) for key in keys if sizes.get(key))
    changes.update(_depth_changes(sizes, depth))
    length = None if sequence_length is None else 8 * unit
    if length is not None and "sequence_length" in sizes:
        changes.pop("sequence_length", None)  # given separately
    words = [f"{key}={value}" for key, value in changes.items() if value != sizes.get(key)]
    return SmallerModel(reference=changed_reference(reference, words), sequence_length=length)


def _sizes(reference: str, sequence_length: int | None) -> Mapping[str, Any]:
    """Dimensions of a model by the names that `--set` takes."""
    if ":" in reference.partition("+")[0]:
        raise RequestError(
            f"{reference} is built by a factory, which decides its dims; give a factory of a smaller model with the"
            " same layers: --small package.module:factory"
        )
    if looks_like_config(reference):
        from planner.models.huggingface.from_config import config_content

        return config_content(reference)[1]
    from planner.models.zoo import zoo_config

    config = zoo_config(reference, sequence_length)
    return {name: getattr(config, name) for name in type(config).__slots__}


def _depth_changes(sizes: Mapping[str, Any], depth: Depth | None) -> dict[str, int]:
    if depth is None:
        return {}
    layers = {key: depth.layers for key in _LAYERS if isinstance(sizes.get(key), int)}
    dense = {key: depth.dense for key in _DENSE if sizes.get(key)}
    return {**layers, **dense}


def _times(count: int) -> "_Small":
    return lambda sizes, key, unit: count * unit


def _fixed(value: int) -> "_Small":
    return lambda sizes, key, unit: value


def _at_most(value: int) -> "_Small":
    return lambda sizes, key, unit: min(value, sizes[key])


def _hidden(sizes: Mapping[str, Any], key: str, unit: int) -> int:
    """The width of all heads together where the model has that, as without a head size of its own."""
    return 2 * unit * _HEAD


def _key_heads(sizes: Mapping[str, Any], key: str, unit: int) -> int:
    """One for all heads, one for each head, or one for two heads."""
    heads = next(sizes[name] for name in _HEADS if sizes.get(name))
    return 1 if sizes[key] == 1 else 2 * unit if sizes[key] == heads else unit


def _experts(sizes: Mapping[str, Any], key: str, unit: int) -> int:
    return max(2 * unit, _EXPERTS)


def _image(sizes: Mapping[str, Any], key: str, unit: int) -> int:
    """A multiple of two units even after five halvings; unchanged where positions count patches."""
    size: int = sizes[key]
    return size if sizes.get("patch_size") else min(size, 64 * unit)


def _tables(sizes: Mapping[str, Any], key: str, unit: int) -> str:
    return "x".join(str(min(rows, 40 * unit)) for rows in sizes[key])


_Small = Callable[[Mapping[str, Any], str, int], int | str]
_LAYERS = ("num_layers", "num_hidden_layers", "n_layer", "num_decoder_layers")
_DENSE = ("dense_layers", "first_k_dense_replace")
_HEADS = ("num_heads", "num_attention_heads", "n_head")

_RULES: tuple[tuple[tuple[str, ...], _Small], ...] = (
    (("sequence_length",), _times(8)),
    (("hidden_size", "n_embd", "d_model"), _hidden),
    (("ffn_size", "intermediate_size", "n_inner", "d_ff"), _times(24)),
    (_HEADS, _times(2)),
    (("num_kv_heads", "num_key_value_heads"), _key_heads),
    (("head_size", "head_dim", "d_kv", "plain_size", "value_size", "qk_nope_head_dim", "v_head_dim"), _fixed(_HEAD)),
    (("rotary_size", "qk_rope_head_dim"), _fixed(_HEAD // 2)),
    (("q_rank", "q_lora_rank"), _times(14)),
    (("kv_rank", "kv_lora_rank"), _times(10)),
    (("vocab_size",), _times(40)),
    (("num_experts", "num_local_experts", "n_routed_experts"), _experts),
    (("experts_per_token", "num_experts_per_tok", "chosen_groups", "topk_group"), _at_most(_CHOSEN)),
    (("expert_groups", "n_group"), _at_most(_GROUPS)),
    (("expert_size", "moe_intermediate_size"), _times(12)),
    (("shared_size",), _times(20)),
    (("num_classes",), _times(10)),
    (("image_size",), _image),
    (("table_rows",), _tables),
    (("crossed_rows",), _times(40)),
)
"""The small value of each dimension, by the names of the planner's models and of Hugging Face configs. A dimension that
is 0 or absent stays so."""
