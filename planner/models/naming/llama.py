"""Names of the Llama family, and which of its classes computes the same as a decoder here:

    LlamaForCausalLM       plain, and with a GELU in the MLP
    Qwen2ForCausalLM       with biases of the projections to heads
    Qwen3ForCausalLM       with norms of queries and keys
    GemmaForCausalLM       with a GELU and scaled embeddings; weights of its norms are kept as what is added to one
    MixtralForCausalLM     with experts
    Qwen3MoeForCausalLM    with experts, and norms of queries and keys

Experts are stacked here, and tensors of their own there.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from planner.models.llama import LlamaConfig
from planner.models.naming.parts import Built, Naming, Part, Value, whole
from planner.models.naming.refusal import refuse
from planner.models.naming.rules import as_it_is, one_by_one, parts_of, rule

_LIKE_LLAMA = ("llama", "mistral")
_TYPES: Mapping[str, tuple[str, ...]] = {
    "LlamaForCausalLM": _LIKE_LLAMA,
    "Qwen2ForCausalLM": ("qwen2",),
    "Qwen3ForCausalLM": ("qwen3",),
    "GemmaForCausalLM": ("gemma",),
    "MixtralForCausalLM": ("mixtral",),
    "Qwen3MoeForCausalLM": ("qwen3_moe",),
}
_MIXTRAL_NAMES = {"gate": "w1", "down": "w2", "up": "w3"}


def llama_naming(config: LlamaConfig, built: Built) -> Naming:
    """What transformers calls the tensors of a decoder. Raises ModelError, saying what differs, where none of its
    classes computes the same."""
    name = _class_of(config)
    layer = r"model\.layers\.(\d+)\.mlp\."
    experts = (
        (
            rule(layer + r"gate\.weight", r"model.layers.\1.block_sparse_moe.gate.weight"),
            *(
                rule(
                    layer + rf"experts\.{kind}_proj", rf"model.layers.\1.block_sparse_moe.experts.{{}}.{short}.weight",
                    one_by_one,
                )
                for kind, short in _MIXTRAL_NAMES.items()
            ),
        )
        if name == "MixtralForCausalLM"
        else (rule(layer + r"experts\.(\w+)", r"model.layers.\1.mlp.experts.{}.\2.weight", one_by_one),)
    )  # fmt: skip
    norms = _less_one if name == "GemmaForCausalLM" else as_it_is
    parts, _ = parts_of(built, (*experts, rule(r"(.*norm\.weight)", r"\1", norms), rule(r"(.*)", r"\1")))
    return Naming(
        parts=parts,
        config=_config(config, name),
        model_types=_TYPES[name],
        base="model.",
        unused=(*((r"lm_head\.weight",) if config.tied_embeddings else ()), r".*\.rotary_emb\.inv_freq"),
    )


def _less_one(ours: str, theirs: str, shape: tuple[int, ...]) -> Iterator[Part]:
    yield whole(ours, theirs, shape, Value(shift=-1.0))


def _class_of(config: LlamaConfig) -> str:
    """The class that computes the same."""
    if not config.gated:
        refuse("gated=False: the MLPs and experts of these classes have a gate")
    if config.num_experts:
        return _class_with_experts(config)
    if config.qkv_bias and config.qk_norm:
        refuse("qkv_bias=True and qk_norm=True: Qwen2 has the biases, Qwen3 the norms, and nobody both")
    if config.scaled_embeddings:
        if not config.gelu or config.qkv_bias or config.qk_norm:
            refuse(
                "scaled_embeddings=True: only Gemma scales embeddings, with gelu=True, qkv_bias=False and qk_norm=False"
            )
        return "GemmaForCausalLM"
    if config.qkv_bias:
        if config.head_dim * config.num_heads != config.hidden_size:
            refuse(f"head_size={config.head_size}: heads of Qwen2, which has qkv_bias, make up the hidden size")
        return "Qwen2ForCausalLM"
    return "Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"


def _class_with_experts(config: LlamaConfig) -> str:
    """The same of a mixture of experts."""
    name = "Qwen3MoeForCausalLM" if config.qk_norm else "MixtralForCausalLM"
    without = {
        "qkv_bias": config.qkv_bias,
        "gelu": config.gelu,
        "scaled_embeddings": config.scaled_embeddings,
        "shared_size": config.shared_size,
        "balance_speed": config.balance_speed,
        "capacity_factor": config.capacity_factor,
    }
    if not config.qk_norm:
        without["dense_layers"] = config.dense_layers
    for key, value in without.items():
        if value:
            refuse(f"{key}={value}: {name} has no such thing")
    if not config.qk_norm and not config.normalised_weights:
        refuse(f"normalised_weights=False: {name} normalises the weights of chosen experts")
    return name


def _config(config: LlamaConfig, name: str) -> dict[str, Any]:
    mixed = name == "MixtralForCausalLM"
    found = {
        "architectures": [name],
        "model_type": _TYPES[name][0],
        "attention_dropout": 0.0,
        "head_dim": config.head_dim,
        "hidden_act": "gelu_pytorch_tanh" if config.gelu else "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.expert_size if mixed else config.ffn_size,
        "max_position_embeddings": config.sequence_length,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": config.tied_embeddings,
        "vocab_size": config.vocab_size,
    }
    if not config.num_experts:
        return found
    found.update(
        num_experts_per_tok=config.experts_per_token,
        output_router_logits=bool(config.balance_loss),
        router_aux_loss_coef=config.balance_loss,
    )
    if mixed:
        return {**found, "num_local_experts": config.num_experts, "router_jitter_noise": 0.0}
    return {
        **found,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(config.dense_layers)),
        "moe_intermediate_size": config.expert_size,
        "norm_topk_prob": config.normalised_weights,
        "num_experts": config.num_experts,
    }
