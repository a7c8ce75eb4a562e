"""Dense decoders of Hugging Face whose dimensions are those of `planner.models.llama`: what engines are told about
them.

The modules stay those of transformers. This file finds the `LlamaConfig` that computes the same, where there is one.
"""

from collections.abc import Mapping
from typing import Any

_NEEDED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "LlamaForCausalLM": {"attention_bias": (False,), "mlp_bias": (False,)},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"attention_bias": (False,)},
}
"""The architectures, and the values that their configs must have."""


def dense_dimensions(config: Any, architecture: str, length: int) -> dict[str, Any] | None:
    """The dimensions of a `LlamaConfig` for a config and sequences of `length` tokens; None where the config has
    features that such a decoder lacks: windows, stretched positions, other activations, dropout, biases."""
    if architecture not in _NEEDED:
        return None
    needed = {"hidden_act": ("silu",), "attention_dropout": (0.0,), **_NEEDED[architecture]}
    rope = config.rope_parameters
    kinds = getattr(config, "layer_types", None) or ()
    window = getattr(config, "sliding_window", None)
    if any(getattr(config, name, known[0]) not in known for name, known in needed.items()):
        return None
    if rope.get("rope_type", "default") != "default" or any(kind != "full_attention" for kind in kinds):
        return None
    if not kinds and window is not None and window < length:
        return None
    return {
        **decoder_dimensions(config, length),
        "qk_norm": architecture == "Qwen3ForCausalLM",
        "qkv_bias": architecture == "Qwen2ForCausalLM",
    }


def decoder_dimensions(config: Any, length: int) -> dict[str, Any]:
    """The dimensions that a `planner.models.llama.LlamaConfig` and a config of transformers have in common."""
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_size": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        "sequence_length": length,
        "rope_theta": config.rope_parameters["rope_theta"],
        "norm_epsilon": config.rms_norm_eps,
        "tied_embeddings": config.tie_word_embeddings,
        "head_size": getattr(config, "head_dim", None),
    }
