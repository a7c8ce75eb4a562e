"""Decoders given by their dimensions alone, as publications and run logs describe them."""

from dataclasses import dataclass
from typing import Any, Literal

Family = Literal["gpt", "llama"]

TRACED_BATCH = 2
"""Samples of the example inputs."""

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """A decoder of one of the families; in GPT the MLP is four times the hidden size and every head has its keys."""

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

    @property
    def parameters(self) -> int:
        """Weights, norms and biases; shared embeddings once."""
        h, layers = self.hidden, self.layers
        embeddings = self.vocabulary * h * (1 if self.tied else 2)
        if self.family == "gpt":
            return embeddings + self.sequence * h + layers * (12 * h * h + 13 * h) + 2 * h
        keys = self.kv_heads * (h // self.heads)
        return embeddings + layers * (2 * h * h + 2 * h * keys + 3 * h * self.ffn + 2 * h) + h


def build(dimensions: Dimensions) -> tuple[Any, tuple[Any, ...]]:
    """The module, on the meta device, and example inputs of `TRACED_BATCH` samples."""
    import torch

    with torch.device("meta"):
        module = _module(dimensions).to(getattr(torch, DTYPES[dimensions.precision]))
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
    from planner.models.llama import Llama, LlamaConfig

    return Llama(LlamaConfig(**shared, ffn_size=dimensions.ffn, num_kv_heads=dimensions.kv_heads))
