"""Weights of transformers that hold several matrices: taken apart they compute the same, keep their names in files, and
are divided by tensor parallelism as those of a Llama are."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.graph.rewriting.fused_weights import with_fused_weights_apart
from planner.graph.trace import trace
from planner.models.huggingface import from_config
from planner.models.huggingface.taken_apart import pieces_of, together
from planner.models.zoo import BuiltModel, build_model

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "glm4": {**SIZES, "architectures": ["Glm4ForCausalLM"], "model_type": "glm4"},
    "glm": {**SIZES, "architectures": ["GlmForCausalLM"], "model_type": "glm"},
    "longcat": {
        "architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash", "vocab_size": 64,
        "hidden_size": 32, "num_layers": 1, "num_attention_heads": 4, "ffn_hidden_size": 48, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "expert_ffn_hidden_size": 16,
        "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "max_position_embeddings": 64, "head_dim": 8,
    },
}  # fmt: skip
EXPERTS = ("llama4", "ling", "longcat")
LAYERS: Mapping[str, Mapping[str, int]] = {
    "phi3": {"qkv_proj": 3, "gate_up_proj": 2}, "gpt2": {"c_attn": 3}, "mpt": {"Wqkv": 3},
    "modernbert": {"Wqkv": 3, "Wi": 2}, "glm": {"gate_up_proj": 2}, "glm4": {"gate_up_proj": 2},
}  # fmt: skip
"""For each model the layers whose weights hold several matrices, and how many."""


def config_of(name: str, folder: Path, **changed: Any) -> str:
    content = OTHERS[name] if name in OTHERS else json.loads((CONFIGS / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **changed}))
    return str(folder / "config.json")


def whole(reference: str, monkeypatch: pytest.MonkeyPatch) -> BuiltModel:
    with monkeypatch.context() as patched:
        patched.setattr(from_config, "take_apart", lambda module: None)
        torch.manual_seed(0)
        return build_model(reference, dtype="float32", device="cpu", sequence_length=16)


def loss_and_gradients(built: BuiltModel) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    tokens = {name: torch.randint(1, 60, given.shape) for name, given in built.kwargs.items() if "mask" not in name}
    loss = built.module(**{**built.kwargs, **tokens}).loss
    loss.backward()
    gradients = {name: one.grad for name, one in built.module.named_parameters() if one.grad is not None}
    return float(loss.detach()), together(built.module, gradients)


@pytest.mark.parametrize("name", EXPERTS)
def test_parts_compute_what_the_whole_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, loss and gradients; in the graph a product reads every part, and nothing is joined for it."""
    reference = config_of(name, tmp_path)
    wanted = whole(reference, monkeypatch)
    torch.manual_seed(0)
    found = build_model(reference, dtype="float32", device="cpu", sequence_length=16)
    pieces = list(pieces_of(found.module))
    assert pieces
    weights = together(found.module, dict(found.module.named_parameters()))
    known = dict(wanted.module.named_parameters())
    assert weights.keys() == known.keys()
    assert all(torch.equal(weights[key], one) for key, one in known.items())

    loss, gradients = loss_and_gradients(found)
    wanted_loss, wanted_gradients = loss_and_gradients(wanted)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    assert gradients.keys() == wanted_gradients.keys()
    torch.testing.assert_close(gradients, wanted_gradients, rtol=1e-4, atol=1e-6)

    graph = trace(found.module, found.args, found.kwargs)
    kinds = {"aten.linear.default", "aten.addmm.default", "planner.experts.default", "aten.transpose.int"}
    read = {piece.ours: {graph.operators[at].op for at in graph.consumers[piece.ours]} for piece in pieces}
    assert all(by <= kinds for by in read.values()), read


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_taken_apart_in_the_graph(name: str, tmp_path: Path) -> None:
    """All of them; a product reads every part, and nothing is joined or taken apart for it."""
    built = build_model(config_of(name, tmp_path), dtype="float32", sequence_length=16)
    graph = with_fused_weights_apart(trace(built.module, built.args, built.kwargs))
    parts = Counter(cut.of for cut in graph.cuts.values() if cut.of.endswith(".weight"))
    layers = {key.removesuffix(".weight").rpartition(".")[2]: count for key, count in parts.items()}
    assert layers == LAYERS[name]
    wanted = [key for key, _ in built.module.named_parameters() if key.split(".")[-2] in LAYERS[name]]
    assert {cut.of for cut in graph.cuts.values()} == set(wanted)
    read = {graph.operators[at].op for part in graph.cuts for at in graph.consumers[part]}
    assert read <= {"aten.linear.default", "aten.addmm.default"}


def test_layers_stay_whole_where_adapters_are_named_after_them(tmp_path: Path) -> None:
    reference = f"{config_of('phi3', tmp_path)}+lora=4+lora_layers=qkv_proj"
    names = [name for name, _ in build_model(reference, dtype="float32", sequence_length=16).module.named_parameters()]
    assert any(name.endswith("qkv_proj.lora_A.weight") for name in names), names


def test_clipped_queries_stay_with_keys_and_values(tmp_path: Path) -> None:
    """They are clipped before they are split."""
    attention = {"attn_config": {"clip_qkv": 3.0}}
    built = build_model(config_of("mpt", tmp_path, **attention), dtype="float32", sequence_length=16)
    traced = trace(built.module, built.args, built.kwargs)
    assert with_fused_weights_apart(traced) is traced


def test_models_are_known_without_loading_pytorch() -> None:
    """A search of a graph that was kept needs none, and loading it takes a second."""
    code = "import sys, planner.models.huggingface.from_config, planner.models.zoo; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
