"""The keys of a Hugging Face `config.json` that the planner uses, checked before transformers sees them: types, ranges,
divisors.

Other keys belong to transformers, which reports their errors itself when it makes a config or a model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hardware_profiles.foreign import ForeignTextError, Limits, form_fault, parse_json, read_text
from planner.errors import ModelError, unknown_name

LIMITS = Limits(size=2**24, finite=False)
"""Limits for a config: some configs list the names of thousands of classes, and state limits as infinity."""

_Size = Annotated[int, Field(ge=1, le=2**31)]
_Layers = Annotated[int, Field(ge=1, le=4096)]
_Heads = Annotated[int, Field(ge=1, le=2**20)]
_Experts = Annotated[int, Field(ge=1, le=2**16)]
_Count = Annotated[int, Field(ge=0, le=2**31)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Switch = bool | None

ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
"""Keys that name an activation."""


class _Rope(BaseModel):
    """Positions that rotate."""

    model_config = ConfigDict(extra="allow", strict=True)

    rope_type: str | None = None
    type: str | None = None
    rope_theta: _Positive | None = None
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    original_max_position_embeddings: _Size | None = None
    beta_fast: _Positive | None = None
    beta_slow: _Positive | None = None
    mscale: _Weight | None = None
    mscale_all_dim: _Weight | None = None


class _Part(BaseModel):
    """How many layers each part of a model has."""

    model_config = ConfigDict(extra="allow", strict=True)

    num_hidden_layers: _Layers | None = None
    n_layer: _Layers | None = None
    n_layers: _Layers | None = None
    num_layers: _Layers | None = None
    num_encoder_layers: _Layers | None = None
    num_decoder_layers: _Layers | None = None
    encoder_layers: _Layers | None = None
    decoder_layers: _Layers | None = None


class ConfigFile(_Part):
    """Keys of a config by their meaning; each family has other names for them."""

    model_type: str | None = None
    vocab_size: _Size | None = None
    hidden_size: _Size | None = None
    n_embd: _Size | None = None
    d_model: _Size | None = None
    intermediate_size: _Size | list[_Size] | None = None
    n_inner: _Size | None = None
    d_ff: _Size | None = None
    d_kv: _Size | None = None
    max_position_embeddings: _Size | None = None
    n_positions: _Size | None = None
    sliding_window: _Count | None = None  # 0 is none
    num_attention_heads: _Heads | None = None
    n_head: _Heads | None = None
    num_heads: _Heads | list[_Heads] | None = None  # several where stages differ, as in Swin
    num_key_value_heads: _Heads | None = None
    head_dim: _Size | None = None

    image_size: _Size | Annotated[list[_Size], Field(min_length=2, max_length=2)] | None = None
    patch_size: _Size | Annotated[list[_Size], Field(min_length=2, max_length=2)] | None = None
    num_channels: _Size | None = None

    hidden_act: str | None = None
    hidden_activation: str | None = None
    activation_function: str | None = None
    rms_norm_eps: _Positive | None = None
    layer_norm_eps: _Positive | None = None
    layer_norm_epsilon: _Positive | None = None
    initializer_range: _Weight | None = None
    attention_dropout: _Share | None = None
    rope_theta: _Positive | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    tie_word_embeddings: _Switch = None
    layer_types: list[str] | None = None
    hybrid_override_pattern: str | None = None
    layers_block_type: list[str] | None = None

    num_experts: _Experts | None = None
    num_local_experts: _Experts | None = None
    n_routed_experts: _Experts | None = None
    num_experts_per_tok: _Experts | None = None
    n_shared_experts: _Count | None = None
    moe_intermediate_size: _Size | list[_Size] | None = None
    mlp_only_layers: list[_Count] | None = None
    first_k_dense_replace: _Count | None = None
    n_group: _Experts | None = None
    topk_group: _Experts | None = None
    topk_method: str | None = None
    norm_topk_prob: _Switch = None
    output_router_logits: _Switch = None
    router_aux_loss_coef: _Weight | None = None
    aux_loss_alpha: _Weight | None = None
    routed_scaling_factor: _Positive | None = None
    moe_latent_size: _Size | None = None
    moe_shared_expert_intermediate_size: _Size | None = None
    expert_capacity: _Count | None = None
    router_jitter_noise: _Weight | None = None
    q_lora_rank: _Size | None = None
    kv_lora_rank: _Size | None = None
    qk_nope_head_dim: _Size | None = None
    qk_rope_head_dim: _Size | None = None
    v_head_dim: _Size | None = None

    @model_validator(mode="after")
    def _divides(self) -> "ConfigFile":
        """Check which numbers must divide, or fit into, others."""
        hidden, heads = self.hidden_size or self.n_embd, self.num_attention_heads or self.n_head
        own_size = self.head_dim or self.v_head_dim
        kv_heads, groups = self.num_key_value_heads, self.n_group
        experts = self.num_experts or self.num_local_experts or self.n_routed_experts
        chosen = self.num_experts_per_tok
        if hidden and heads and not own_size and hidden % heads:
            raise ValueError(f"the hidden size {hidden} is not a multiple of the {heads} attention heads")
        if heads and kv_heads and heads % kv_heads:
            raise ValueError(f"{heads} attention heads are not a multiple of the {kv_heads} key and value heads")
        if experts and chosen and chosen > experts:
            raise ValueError(f"a token takes {chosen} experts (num_experts_per_tok), and there are {experts}")
        if experts and groups and experts % groups:
            raise ValueError(f"{experts} experts do not divide into {groups} groups (n_group)")
        if groups and self.topk_group and self.topk_group > groups:
            raise ValueError(f"a token takes {self.topk_group} groups (topk_group), and there are {groups}")
        layers = self.num_hidden_layers
        for key, said in (
            ("hybrid_override_pattern", (self.hybrid_override_pattern or "").replace("|", "")),
            ("layers_block_type", self.layers_block_type or ()),
            ("layer_types", self.layer_types or ()),
        ):
            if layers and said and len(said) != layers:
                raise ValueError(f"num_hidden_layers is {layers}, and {key} has {len(said)} layers")
        rotary = self.qk_rope_head_dim or self.head_dim
        if rotary and rotary % 2:
            raise ValueError(f"heads rotate {rotary} numbers in pairs: that is an odd number")
        return self


def read_config(path: Path) -> dict[str, Any]:
    """The content of a config file. Raises ModelError, naming the file and the key, where it is no config."""
    try:
        content = parse_json(read_text(path, LIMITS.size), LIMITS)
    except ForeignTextError as error:
        raise ModelError(f"{path}: {error}; give the config.json of a model") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: is no config of a model: it needs keys, as 'architectures'")
    check_config(content, path)
    return content


_TEXT = ("text_config", "text_encoder", "decoder", "generator")
"""Keys for the config of the part that reads tokens."""


def check_config(content: Mapping[str, Any], path: Path) -> None:
    """Raise ModelError, naming the file and the key, where a config, or the config of a part, says something impossible
    for a model."""
    _check(content, ConfigFile, path, "")
    for key, part in content.items():
        if isinstance(part, Mapping) and (key in (*_TEXT, "encoder") or key.endswith("_config")):
            _check(part, ConfigFile if key in _TEXT else _Part, path, f"{key}: ")


def _check(content: Mapping[str, Any], kind: type[_Part], path: Path, where: str) -> None:
    try:
        kind.model_validate(content)
    except ValidationError as error:
        fault = form_fault(error).removeprefix("the file: ")
        raise ModelError(f"{path}: {where}{fault}; correct it") from error


_DECODER = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps",
    "num_experts_per_tok", "rope_parameters",
)  # fmt: skip
_DEEPSEEK = (
    *_DECODER, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts",
    "moe_intermediate_size", "first_k_dense_replace", "norm_topk_prob", "routed_scaling_factor",
)  # fmt: skip
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "MixtralForCausalLM": (*_DECODER, "num_key_value_heads", "num_local_experts", "router_aux_loss_coef"),
    "Qwen3MoeForCausalLM": (
        *_DECODER, "num_key_value_heads", "num_experts", "router_aux_loss_coef", "moe_intermediate_size",
        "mlp_only_layers", "norm_topk_prob",
    ),
}  # fmt: skip
"""For architectures built as decoders of the planner: keys whose defaults must not be null."""


def check_present(config: Any, architecture: str, path: Path) -> None:
    """Raise ModelError where a config says null for a value that its model needs."""
    images = ("image_size", "num_channels") if architecture.endswith("ForImageClassification") else ()
    for key in (*images, *_NEEDED.get(architecture, ())):
        if getattr(config, key, None) is None:
            raise ModelError(f"{path}: {key} is missing; {architecture} cannot be built without it")
    if "rope_parameters" in _NEEDED.get(architecture, ()) and config.rope_parameters.get("rope_theta") is None:
        raise ModelError(f"{path}: rope_parameters.rope_theta is missing; {architecture} cannot be built without it")


def check_activations(content: Mapping[str, Any], known: Mapping[str, Any], path: Path) -> None:
    """Raise ModelError for an activation that transformers does not know."""
    for key in ACTIVATIONS:
        name = content.get(key)
        if name is not None and name not in known:
            raise ModelError(f"{path}: {key}: {unknown_name('activation', str(name), known)}")
