"""Decoders given by their dimensions alone, as publications and run logs describe them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from planner.models.adapters import Adapters
from planner.models.deepseek_models import DEEPSEEK_MODELS

Family = Literal["gpt", "llama", "nemotron", "deepseek"]

TRACED_BATCH = 2
"""Samples of the example inputs."""

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """A decoder of one of the families. In GPT the MLP is four times the hidden size and every head has its keys. A
    Nemotron is a Llama whose MLP, or experts, have two matrices, up and down.

    `head_size` None divides the hidden size among the heads. `experts` None is a dense model. A DeepSeek has the latent
    attention and the routers of `like`, a model of the zoo. With `adapters` only these are trained. `qk_norm`:
    whether queries and keys of each head are normalised; in GPT they are not.
    """

    family: Family
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    sequence: int
    precision: str
    head_size: int | None = None
    experts: "ExpertDimensions | None" = None
    like: str = ""
    adapters: Adapters | None = None
    qk_norm: bool = False

    @property
    def parameters(self) -> int:
        """Weights, norms and biases; shared embeddings once, adapters not."""
        h, layers = self.hidden, self.layers
        embeddings = self.vocabulary * h * (1 if self.tied else 2)
        if self.family == "gpt":
            return embeddings + self.sequence * h + layers * (12 * h * h + 13 * h) + 2 * h
        attention = self._attention()
        dense = layers if self.experts is None else self.experts.dense_layers
        matrices = 2 if self.family == "nemotron" else 3
        routed = 0 if self.experts is None else self.experts.parameters(h, matrices)
        return (
            embeddings + layers * (attention + 2 * h) + dense * matrices * h * self.ffn + (layers - dense) * routed + h
        )

    def _attention(self) -> int:
        """Weights and norms of the attention of a layer."""
        h = self.hidden
        if self.family == "deepseek":
            return _latent_attention(h, self.heads, dict(DEEPSEEK_MODELS[self.like].dimensions))
        head = h // self.heads if self.head_size is None else self.head_size
        return 2 * h * head * (self.heads + self.kv_heads) + (2 * head if self.qk_norm else 0)


def _latent_attention(h: int, heads: int, sizes: Mapping[str, Any]) -> int:
    """Weights and norms: of queries, of the latent vector with the part of keys beside it, of keys and values, and of
    the output projection."""
    rank, latent, rotary = sizes["q_rank"], sizes["kv_rank"], sizes["rotary_size"]
    key = sizes["plain_size"] + rotary
    queries = rank * (h + 1 + heads * key) if rank else h * heads * key
    made = latent * (1 + heads * (sizes["plain_size"] + sizes["value_size"]))
    return int(queries + h * (latent + rotary) + made + heads * sizes["value_size"] * h)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertDimensions:
    """Experts in place of the MLP: their number, how many a token takes, and the width of each; the width of an MLP for
    all tokens beside them, or 0; the number of first layers without experts."""

    count: int
    chosen: int
    width: int
    shared_width: int = 0
    dense_layers: int = 0

    def parameters(self, hidden: int, matrices: int) -> int:
        """Weights of a layer: experts of so many matrices, the MLP for all tokens, and the router."""
        return hidden * (matrices * (self.count * self.width + self.shared_width) + self.count)


def build(dimensions: Dimensions) -> tuple[Any, tuple[Any, ...]]:
    """The module, on the meta device, and example inputs of `TRACED_BATCH` samples."""
    import torch

    with torch.device("meta"):
        module = _module(dimensions).to(getattr(torch, DTYPES[dimensions.precision]))
        if dimensions.adapters is not None:
            from planner.models.low_rank import add_adapters

            add_adapters(module, dimensions.adapters, "the model of a row")
        tokens = torch.zeros(TRACED_BATCH, dimensions.sequence, dtype=torch.int64)
    return module, (tokens, tokens.clone())


def _module(dimensions: Dimensions) -> Any:
    shared: dict[str, Any] = {
        "num_layers": dimensions.layers,
        "hidden_size": dimensions.hidden,
        "num_heads": dimensions.heads,
        "vocab_size": dimensions.vocabulary,
        "sequence_length": dimensions.sequence,
        "tied_embeddings": dimensions.tied,
    }
    if dimensions.family == "gpt":
        from planner.models.gpt import GPT, GPTConfig

        return GPT(GPTConfig(**shared))
    if dimensions.family == "deepseek":
        from planner.models.deepseek import Deepseek, DeepseekConfig

        del shared["tied_embeddings"]
        sizes: dict[str, Any] = {
            **dict(DEEPSEEK_MODELS[dimensions.like].dimensions),
            **shared,
            "ffn_size": dimensions.ffn,
        }
        return Deepseek(DeepseekConfig(**{**sizes, **_expert_sizes(dimensions)}))
    from planner.models.llama import Llama, LlamaConfig

    shared.update(ffn_size=dimensions.ffn, num_kv_heads=dimensions.kv_heads, head_size=dimensions.head_size)
    shared.update(gated=dimensions.family != "nemotron", qk_norm=dimensions.qk_norm)
    return Llama(LlamaConfig(**shared, **_expert_sizes(dimensions)))


def _expert_sizes(dimensions: Dimensions) -> dict[str, Any]:
    """Dimensions under their names in the configs of decoders with experts; empty for a dense decoder."""
    if (experts := dimensions.experts) is None:
        return {}
    return {
        "num_experts": experts.count,
        "experts_per_token": experts.chosen,
        "expert_size": experts.width,
        "shared_size": experts.shared_width,
        "dense_layers": experts.dense_layers,
    }
