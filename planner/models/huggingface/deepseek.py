"""DeepSeek-V2 and V3 of Hugging Face, built as the decoders of `planner.models.deepseek` from a config.

The computation is the same, with three differences: labels are not shifted here, so they are the next tokens; weights
of experts have names of their own; and positions rotate halves, which is another order of rows where transformers
rotates neighbours. Two parts of training are added, which their modules lack: the load-balancing loss over each
sequence, where the config has a coefficient for it (`aux_loss_alpha`), and in V3 the speed of the biases that choose
experts. No config has that speed; it is the published one (DeepSeek-AI 2024, arXiv 2412.19437, section 4.2).

Modules that predict further tokens (`num_nextn_predict_layers`) are left out, as in transformers.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from planner.errors import ModelError
from planner.models.huggingface.mixtures import check_needed

_SHARED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "mlp_bias": (False,),
    "moe_layer_freq": (1,),
    "rms_norm_eps": (1e-6,),  # what their norms of latent vectors have, whatever the config says
    "tie_word_embeddings": (False,),
}
_NEEDED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "DeepseekV2ForCausalLM": {**_SHARED, "norm_topk_prob": (False,), "scoring_func": ("softmax",)},
    "DeepseekV3ForCausalLM": {**_SHARED, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
}
"""The architectures, and the values that their configs must have for the decoders here to be the same."""

_BY_BEST_EXPERT = "group_limited_greedy"
_METHODS = ("greedy", _BY_BEST_EXPERT)
"""How tokens of V2 choose their experts: among all, or in the groups with the best experts."""

_BIAS_SPEED = 0.001
_STILL = ("default", "linear", "yarn")
"""Types of positions whose frequencies are the same for sequences of all lengths."""


def is_deepseek(architecture: str) -> bool:
    """Whether an architecture is one of these."""
    return architecture in _NEEDED


Stretched = Callable[[Any, str], tuple[tuple[float, ...], float]]
"""Frequencies of a config with positions of some type, and the factor of the rotated parts."""


def deepseek_of(config: Any, architecture: str, length: int, path: Path, stretched: Stretched) -> dict[str, Any]:
    """The dimensions of a `planner.models.deepseek.DeepseekConfig` for a config and sequences of `length` tokens.

    Raises ModelError, naming the file, where the config has features that such a decoder lacks.
    """
    check_needed(config, architecture, _NEEDED[architecture], path)
    if config.num_key_value_heads != config.num_attention_heads:
        raise ModelError(
            f"{path}: num_key_value_heads={config.num_key_value_heads} and num_attention_heads="
            f"{config.num_attention_heads} differ; a latent vector makes keys for every head"
        )
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_size": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "q_rank": config.q_lora_rank or 0,
        "kv_rank": config.kv_lora_rank,
        "plain_size": config.qk_nope_head_dim,
        "rotary_size": config.qk_rope_head_dim,
        "value_size": config.v_head_dim,
        "vocab_size": config.vocab_size,
        "sequence_length": length,
        "num_experts": config.n_routed_experts,
        "expert_size": config.moe_intermediate_size,
        "shared_size": (config.n_shared_experts or 0) * config.moe_intermediate_size,
        "dense_layers": config.first_k_dense_replace,
        "norm_epsilon": config.rms_norm_eps,
        **_routing(config, architecture, path),
        **_positions(config, path, stretched),
    }


def _routing(config: Any, architecture: str, path: Path) -> dict[str, Any]:
    """How tokens choose experts."""
    if config.num_experts_per_tok is None:
        raise ModelError(f"{path}: num_experts_per_tok is missing; say how many experts a token takes")
    third = architecture == "DeepseekV3ForCausalLM"
    if not third and config.topk_method not in _METHODS:
        raise ModelError(
            f"{path}: topk_method is {config.topk_method!r}; {architecture} is built here with {' or '.join(_METHODS)}"
        )
    loss = float(getattr(config, "aux_loss_alpha", 0.0) or 0.0)
    if loss and not getattr(config, "seq_aux", False):
        raise ModelError(
            f"{path}: aux_loss_alpha is {loss} and seq_aux is not true: loads are evened out here over each sequence;"
            " set seq_aux, or aux_loss_alpha to 0"
        )
    grouped = third or config.topk_method == _BY_BEST_EXPERT
    return {
        "experts_per_token": config.num_experts_per_tok,
        "normalised_weights": bool(config.norm_topk_prob),
        "sigmoid_scores": third,
        "weight_scale": float(config.routed_scaling_factor),
        "expert_groups": (config.n_group or 1) if grouped else 1,
        "chosen_groups": (config.topk_group or 1) if grouped else 1,
        "groups_by": 2 if third else 1,
        "balance_loss": loss,
        "balance_speed": _BIAS_SPEED if third else 0.0,
    }


def _positions(config: Any, path: Path, stretched: Stretched) -> dict[str, Any]:
    """Frequencies by which parts of heads are rotated, and the scale of the scores: YaRN stretches the former and
    changes the latter (Peng et al. 2023, arXiv 2309.00071, section 3)."""
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind not in _STILL:
        raise ModelError(f"{path}: positions of the type '{kind}' are not built here; there are {', '.join(_STILL)}")
    if kind == "default":
        return {"rope_theta": rope["rope_theta"]}
    frequencies, magnitude = stretched(config, kind)
    sharper = 1.0
    if rope.get("mscale_all_dim") and rope["factor"] > 1:
        sharper = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1.0
    return {
        "rope_theta": rope["rope_theta"],
        "rope_frequencies": frequencies,
        "rope_magnitude": magnitude,
        "score_scale": sharper**2,
    }
