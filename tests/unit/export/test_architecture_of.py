"""Dimensions of models that engines can build."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from planner.export.architecture import architecture_of
from planner.models.llama import LlamaConfig
from planner.models.zoo import ZOO

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
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


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("llama", {"family": "llama", "layers": 3, "ffn": 64, "kv_heads": 2, "head_size": 8, "qk_norm": False}),
        ("qwen3", {"family": "llama", "qk_norm": True}),
        ("mixtral", {"family": "llama", "normalised": True}),
        ("qwen3-moe", {"family": "llama", "qk_norm": True}),
    ],
)
def test_engines_are_told_of_configs_that_compute_what_decoders_here_do(family: str, said: dict[str, object]) -> None:
    found = architecture_of(str(CONFIGS / family / "config.json"), 8, latent=True)
    assert found is not None
    assert {name: getattr(found, name) for name in said} == said
    assert (found.sequence, found.experts is None) == (8, family in ("llama", "qwen3"))


def test_other_configs_are_left_to_their_graph(tmp_path: Path) -> None:
    """Windows, biases, capped scores, positions that are stretched, and files that are gone."""
    for family in ("mistral", "qwen2", "gemma2", "gpt2", "t5-hf", "gone/config.json"):
        assert architecture_of(str(CONFIGS / family), 8) is None
    assert architecture_of(str(CONFIGS / "qwen2"), 8, every=True) is not None
    content = json.loads((CONFIGS / "llama" / "config.json").read_text())
    content["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert architecture_of(str(tmp_path), 8) is None


def test_lengths_and_changes_count() -> None:
    found = architecture_of("llama8b", 4096)
    assert found is not None
    assert (found.sequence, found.layers, found.kv_heads, found.head_size) == (4096, 32, 8, 128)
