"""Dimensions of models that engines can build."""

from dataclasses import fields

import pytest

from planner.export.architecture import architecture_of
from planner.models.llama import LlamaConfig
from planner.models.zoo import ZOO

SAID = {
    "num_layers", "hidden_size", "ffn_size", "num_heads", "num_kv_heads", "vocab_size", "sequence_length", "rope_theta",
    "norm_epsilon", "tied_embeddings", "head_size", "qk_norm", "num_experts", "experts_per_token", "expert_size",
    "shared_size", "dense_layers", "normalised_weights", "balance_loss",
}  # fmt: skip
WRITTEN = {"qkv_bias", "gelu", "scaled_embeddings"}  # where the model itself is
REFUSED = {"balance_speed", "capacity_factor"}


def test_every_dimension_of_llama_is_said_or_refused() -> None:
    assert {field.name for field in fields(LlamaConfig)} == SAID | WRITTEN | REFUSED | {"gated"}
    assert architecture_of("llama8b+gated=False", None, every=True) is None


@pytest.mark.parametrize("model", [name for name, entry in ZOO.items() if entry.family in ("llama", "gpt")])
def test_every_such_decoder_can_be_written_out(model: str) -> None:
    found = architecture_of(model, None, every=True)
    assert found is not None
    assert (architecture_of(model, None) is None) == any((found.qkv_bias, found.gelu, found.scaled_embeddings))
    for change in REFUSED if found.experts else ():
        assert architecture_of(f"{model}+{change}=0.5", None, every=True) is None


@pytest.mark.parametrize("model", ["bert-base", "resnet50", "deepseek-v3", "package.module:factory", "qwen2.5-7b"])
def test_other_models_are_left_to_their_graph(model: str) -> None:
    assert architecture_of(model, None) is None


def test_lengths_and_changes_count() -> None:
    found = architecture_of("llama8b", 4096)
    assert found is not None
    assert (found.sequence, found.layers, found.kv_heads, found.head_size) == (4096, 32, 8, 128)
