"""Mixtures of experts of Hugging Face, built as the decoders of `planner.models.llama` with the dimensions of a config.

In transformers their routing exports either as a loop that depends on the data, or as products of
all experts with all tokens; here it is one operator, whose experts may be divided. The computation is the same, except
that labels are not shifted here, so they are the next tokens; that weights of experts have names of their own; and that
the load-balancing loss (with output_router_logits) is that of Megatron-LM: the sum of the losses of all layers, each
by shares of choices. Transformers takes one loss of the loads of all layers, by choices per token: with K experts of a
token and even loads it is K times the mean of these losses.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.errors import ModelError
from planner.models.huggingface.decoders import decoder_dimensions

_NEEDED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "MixtralForCausalLM": {"hidden_act": ("silu",), "router_jitter_noise": (0.0, None), "attention_dropout": (0.0,)},
    "Qwen3MoeForCausalLM": {
        "hidden_act": ("silu",),
        "decoder_sparse_step": (1,),
        "attention_bias": (False,),
        "attention_dropout": (0.0,),
    },
}
"""The architectures, and the values that their configs must have for the decoders here to be the same."""


def is_mixture(architecture: str) -> bool:
    """Whether an architecture is one of these."""
    return architecture in _NEEDED


def mixture_of(config: Any, architecture: str, length: int, path: Path) -> dict[str, Any]:
    """The dimensions of a `planner.models.llama.LlamaConfig` for a config and sequences of `length` tokens.

    Raises ModelError, naming the file, where the config has features that such a decoder lacks.
    """
    check_needed(config, architecture, _NEEDED[architecture], path)
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise ModelError(f"{path}: positions of the type '{rope['rope_type']}' are not built here; leave it 'default'")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < length:
        raise ModelError(
            f"{path}: sliding_window {window} is shorter than the sequence of {length} tokens, and attention here"
            " sees all of it; make sequences shorter, or write a factory: --model package.module:factory"
        )
    qwen = architecture == "Qwen3MoeForCausalLM"
    return {
        **decoder_dimensions(config, length),
        "qk_norm": qwen,
        "num_experts": config.num_experts if qwen else config.num_local_experts,
        "experts_per_token": config.num_experts_per_tok,
        "expert_size": config.moe_intermediate_size if qwen else config.intermediate_size,
        "dense_layers": _dense_layers(config.mlp_only_layers if qwen else [], path),
        "normalised_weights": config.norm_topk_prob if qwen else True,
        "balance_loss": config.router_aux_loss_coef if config.output_router_logits else 0.0,
    }


def check_needed(config: Any, architecture: str, needed: Mapping[str, tuple[Any, ...]], path: Path) -> None:
    """Raise ModelError where a config does not have what is `needed`: one of several values for each name."""
    for name, known in needed.items():
        if getattr(config, name, known[0]) not in known:
            raise ModelError(
                f"{path}: {name} is {getattr(config, name)!r}; {architecture} is built here with {known[0]!r} only"
            )


def _dense_layers(dense: Sequence[int], path: Path) -> int:
    """How many layers have no experts: the first ones."""
    if sorted(dense) != list(range(len(dense))):
        raise ModelError(f"{path}: mlp_only_layers {list(dense)}: only the first layers can be without experts here")
    return len(dense)
