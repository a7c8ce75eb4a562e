"""Dimensions of decoders that engines can build themselves, from the zoo or from a config of transformers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planner.models.dimensions import ExpertDimensions

if TYPE_CHECKING:
    from planner.models.deepseek import DeepseekConfig
    from planner.models.llama import LlamaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1).

    Attributes:
        q_rank: rank of queries, 0 for none.
        kv_rank: rank of keys and values.
        plain: size of a head's part without positions.
        rotary: size of a head's part with positions.
        value: size of a head's values.
    """

    q_rank: int
    kv_rank: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How routers of DeepSeek choose experts.

    Attributes:
        sigmoid: whether scores are sigmoids, else a softmax.
        scale: factor on the weights.
        groups: groups of experts.
        chosen: groups from which a token may choose.
        groups_by: number of best experts by which groups are compared.
        bias_speed: step of the biases that balance loads, 0 for none.
    """

    sigmoid: bool
    scale: float
    groups: int
    chosen: int
    groups_by: int
    bias_speed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder of one of three families, with its dimensions.

    "llama" has RMS norms, rotary positions and gated MLPs without biases. "gpt" has layer norms, learned positions and
    MLPs with biases. "deepseek" is a Llama with `latent` attention and `routing`; its balance loss is over each sample,
    and modules after its blocks predict `predicted` further tokens, whose losses count `predicted_weight` on average.

    `normalised` says whether the weights of a token's experts sum to 1. `balance_loss` is the coefficient of the loss
    that balances their loads, 0 for none. `qkv_bias` (biases of the projections to heads), `gelu` (a GELU in the gated
    MLP) and `scaled_embeddings` (embeddings times the root of the hidden size) can be told only to the script that
    writes out the model.
    """

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    sequence: int
    rope_theta: float
    epsilon: float
    tied: bool
    qk_norm: bool = False
    experts: ExpertDimensions | None = None
    normalised: bool = True
    balance_loss: float = 0.0
    qkv_bias: bool = False
    gelu: bool = False
    scaled_embeddings: bool = False
    latent: Latent | None = None
    routing: Routing | None = None
    predicted: int = 0
    predicted_weight: float = 0.0

    @property
    def usual_heads(self) -> bool:
        """Whether the sizes of all heads make the hidden size."""
        return self.heads * self.head_size == self.hidden


def architecture_of(
    reference: str, sequence_length: int | None, *, every: bool = False, latent: bool = False
) -> Architecture | None:
    """The architecture of a model of the zoo or of a config, for sequences of `sequence_length` tokens.

    Dimensions that were changed by name (`--set`) count. None if the model is the user's own, or no decoder of the
    three families. `every` also accepts properties that no engine can be told, `latent` models with latent attention.
    """
    from planner.models.huggingface.from_config import dimensions_of, is_config
    from planner.models.overrides import split_reference
    from planner.models.zoo import ZOO, zoo_entry

    name, _ = split_reference(reference)
    if ":" in reference or (name not in ZOO and not is_config(name)):
        return None
    from planner.models.deepseek import DeepseekConfig
    from planner.models.llama import LlamaConfig

    if name not in ZOO:
        sizes = dimensions_of(reference, sequence_length)
        if isinstance(sizes, LlamaConfig):
            return _llama(sizes, every)
        return None if sizes is None or not latent else _deepseek(sizes, every)
    entry = zoo_entry(reference)
    if entry.family not in ("llama", "gpt", *(["deepseek"] if latent else [])):
        return None
    dimensions: dict[str, Any] = dict(entry.dimensions)
    if sequence_length is not None:
        dimensions["sequence_length"] = sequence_length
    if entry.family == "deepseek":
        return _deepseek(DeepseekConfig(**dimensions), every)
    return _gpt(dimensions) if entry.family == "gpt" else _llama(LlamaConfig(**dimensions), every)


def predicted_by(reference: str) -> int:
    """Tokens beyond the next one that a model of the zoo predicts, with modules after its blocks."""
    from planner.models.overrides import split_reference
    from planner.models.zoo import ZOO, zoo_entry

    if ":" in reference or split_reference(reference)[0] not in ZOO:
        return 0
    found = dict(zoo_entry(reference).dimensions).get("predicted_tokens", 0)
    return found if isinstance(found, int) else 0


def _deepseek(config: "DeepseekConfig", every: bool) -> Architecture | None:
    """None for properties that no engine can be told.

    These are stretched positions, and groups that are not chosen by the scores of as many experts as a token takes from
    each group (Megatron-LM, group_limited_topk); only the script has those (`every`), but it predicts a single token.
    """
    stretched = config.rope_frequencies or (config.rope_magnitude, config.score_scale) != (1.0, 1.0)
    by_others = config.expert_groups > 1 and config.groups_by * config.chosen_groups != config.experts_per_token
    if stretched or (config.predicted_tokens if every else by_others):
        return None
    return Architecture(
        family="deepseek",
        layers=config.num_layers,
        hidden=config.hidden_size,
        ffn=config.ffn_size,
        heads=config.num_heads,
        kv_heads=config.num_heads,
        head_size=config.value_size,
        vocabulary=config.vocab_size,
        sequence=config.sequence_length,
        rope_theta=config.rope_theta,
        epsilon=config.norm_epsilon,
        tied=False,
        qk_norm=True,
        experts=ExpertDimensions(
            count=config.num_experts,
            chosen=config.experts_per_token,
            width=config.expert_size,
            shared_width=config.shared_size,
            dense_layers=config.dense_layers,
        ),
        normalised=config.normalised_weights,
        balance_loss=config.balance_loss,
        latent=Latent(
            q_rank=config.q_rank,
            kv_rank=config.kv_rank,
            plain=config.plain_size,
            rotary=config.rotary_size,
            value=config.value_size,
        ),
        routing=Routing(
            sigmoid=config.sigmoid_scores,
            scale=config.weight_scale,
            groups=config.expert_groups,
            chosen=config.chosen_groups,
            groups_by=config.groups_by,
            bias_speed=config.balance_speed,
        ),
        predicted=config.predicted_tokens,
        predicted_weight=config.predicted_weight if config.predicted_tokens else 0.0,
    )


def _gpt(dimensions: dict[str, Any]) -> Architecture:
    from planner.models.gpt import GPTConfig

    config = GPTConfig(**dimensions)
    return Architecture(
        family="gpt",
        layers=config.num_layers,
        hidden=config.hidden_size,
        ffn=config.ffn_size,
        heads=config.num_heads,
        kv_heads=config.num_heads,
        head_size=config.hidden_size // config.num_heads,
        vocabulary=config.vocab_size,
        sequence=config.sequence_length,
        rope_theta=0.0,
        epsilon=config.norm_epsilon,
        tied=config.tied_embeddings,
    )


def _llama(config: "LlamaConfig", every: bool) -> Architecture | None:
    """None for properties that no `Architecture` has: biases, other activations, an MLP without a gate, routers that
    balance by biases or drop tokens."""
    unusual = (config.qkv_bias, config.gelu, config.scaled_embeddings)
    if config.balance_speed or config.capacity_factor or not config.gated or (any(unusual) and not every):
        return None
    experts = None
    if config.num_experts:
        experts = ExpertDimensions(
            count=config.num_experts,
            chosen=config.experts_per_token,
            width=config.expert_size,
            shared_width=config.shared_size,
            dense_layers=config.dense_layers,
        )
    return Architecture(
        family="llama",
        layers=config.num_layers,
        hidden=config.hidden_size,
        ffn=config.ffn_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_size=config.head_dim,
        vocabulary=config.vocab_size,
        sequence=config.sequence_length,
        rope_theta=config.rope_theta,
        epsilon=config.norm_epsilon,
        tied=config.tied_embeddings,
        qk_norm=config.qk_norm,
        experts=experts,
        normalised=config.normalised_weights,
        balance_loss=config.balance_loss,
        qkv_bias=config.qkv_bias,
        gelu=config.gelu,
        scaled_embeddings=config.scaled_embeddings,
    )
