"""Models of Hugging Face from a config.json: built without weights, traced, and every operator has a rule."""

import builtins
import copy
import errno
import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.errors import ModelError, RequestError
from planner.graph.fp8 import Fp8, with_fp8
from planner.graph.kinds import find_blocks
from planner.graph.operator_graph import OperatorGraph
from planner.graph.rewriting.masks import MASKED_ATTENTION
from planner.graph.trace import trace
from planner.graph.tracing.alike import description
from planner.models.deepseek import Deepseek, DeepseekConfig
from planner.models.huggingface.any_experts import AS_ONE_OPERATOR
from planner.models.huggingface.config import check_config
from planner.models.huggingface.deepseek import deepseek_of
from planner.models.huggingface.from_config import _changed, from_config, stretched
from planner.models.huggingface.rewriting import experts_where_they_can
from planner.models.huggingface.taken_apart import pieces_of, together
from planner.models.zoo import BuiltModel, build_model
from planner.sharding.rescale import rescale_batch
from planner.sharding.rules import rule_of
from tests.refusals import refused

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DEEPSEEK = ("deepseek-v2", "deepseek-v3")
FAMILIES = (
    "bert-hf", *DEEPSEEK, "deberta", "falcon", "gpt-oss", "gpt2", "llama", "mistral", "mixtral",
    "modernbert", "olmoe", "qwen2", "qwen3", "qwen3-moe", "qwen3-next", "t5-hf", "vit",
    "whisper",
)  # fmt: skip
ATTENTION = "aten.scaled_dot_product_attention.default"
EXPERTS = "planner.experts.default"


def built(family: str, **options: Any) -> BuiltModel:
    length = {} if family == "vit" else {"sequence_length": 8}
    return build_model(str(CONFIGS / family), dtype="bfloat16", **{**length, **options})


@cache
def traced(family: str) -> OperatorGraph:
    model = built(family)
    return trace(model.module, model.args, model.kwargs)


@pytest.mark.cases(1, 1)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_traced_and_can_be_planned(family: str) -> None:
    model = built(family)
    assert all(tensor.is_meta for tensor in (*model.module.parameters(), *model.module.buffers()))
    graph = trace(model.module, model.args, model.kwargs)
    for op in graph.operators:
        rule_of(graph, op)
    assert find_blocks(graph).count >= 2
    assert set(graph.inputs) == {*model.kwargs, *(f"args_{at}" for at in range(len(model.args)))}
    larger = rescale_batch(graph, model.batch, 6)
    assert all(larger.types[name].shape[0] == 6 for name in larger.inputs)


@pytest.mark.thorough
def test_an_indexer_chooses_keys_that_attention_reads() -> None:
    """DeepSeek-V3.2: with 4 of 8 keys for each query, attention has a mask, in which they are written."""
    graph = traced("deepseek-v32")
    attention = [op for op in graph.operators if op.op == ATTENTION]
    assert len(attention) == 2
    assert all(graph.types[op.operands[3]].shape[-2:] == (8, 8) for op in attention)
    assert sum(op.op == "aten.topk.default" and op.arguments[1] == 4 for op in graph.operators) == 2


@pytest.fixture(scope="module")
def in_chunks(tmp_path_factory: pytest.TempPathFactory) -> OperatorGraph:
    """Llama 4, with chunks of half a sequence."""
    config = changed(tmp_path_factory.mktemp("llama4"), "llama4", attention_chunk_size=4)
    model = build_model(config, dtype="bfloat16", sequence_length=8)
    return trace(model.module, model.args, model.kwargs)


@pytest.mark.slow
def test_llama4_sees_its_own_chunk_alone(in_chunks: OperatorGraph) -> None:
    """But in layers without rotary positions, which see all."""
    calls = [op for op in in_chunks.operators if op.op in (ATTENTION, MASKED_ATTENTION)]
    assert [dict(op.keywords).get("chunk") for op in calls] == [4, None, 4, None]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("family", "masks"), [("llama", False), ("gpt2", False), ("mistral", None), ("bert-hf", True)])
def test_masks_are_left_out_where_training_leaves_them_out(family: str, masks: bool | None) -> None:
    """A window is kept as what it says."""
    graph = traced(family)
    calls = [op for op in graph.operators if op.op in (ATTENTION, MASKED_ATTENTION)]
    assert calls
    assert {op.op for op in calls} == {MASKED_ATTENTION if masks is None else ATTENTION}
    if masks is None:
        assert all(dict(op.keywords)["back"] == 3 and len(op.operands) == 3 for op in calls)
        return
    assert all((len(op.operands) == 4) == masks for op in calls)
    causal = [dict(op.keywords).get("is_causal", len(op.arguments) > 5 and op.arguments[5]) for op in calls]
    assert all(causal) != masks


@pytest.mark.usefixtures("whole_weights")
def test_experts_are_one_operator_that_computes_what_those_of_transformers_compute() -> None:
    graph = traced("olmoe")
    rules = [rule_of(graph, op) for op in graph.operators if op.op == EXPERTS]
    assert len(rules) == 2
    assert all({"e", "e@b"} <= {factor.name for factor in rule.factors} for rule in rules)
    model = build_model(str(CONFIGS / "olmoe"), dtype="float32", sequence_length=8, device="cpu")
    inputs = {name: torch.randint(0, 64, tensor.shape) for name, tensor in model.kwargs.items()}
    found = []
    for kind in (AS_ONE_OPERATOR, "eager"):
        model.module.set_experts_implementation(kind)
        model.module.zero_grad()
        loss = model.module(**inputs).loss
        loss.backward()
        found.append([loss.detach(), *(one.grad for one in model.module.parameters())])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("family", "config"), [("llama4", "Llama4TextConfig"), ("switch", "SwitchTransformersConfig")])
def test_layers_that_send_tokens_to_experts_in_another_way_are_copied_and_pickled(family: str, config: str) -> None:
    import transformers

    content = json.loads((CONFIGS / family / "config.json").read_text())
    (name,) = content.pop("architectures")
    del content["model_type"]
    model = getattr(transformers, name)(getattr(transformers, config)(**content))
    for _ in range(2):  # the second time nothing is left to change
        experts_where_they_can(model)
    ids = torch.randint(2, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids}
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [*map(type, again.modules())] == [*map(type, model.modules())]
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)


def test_layers_of_switch_are_alike() -> None:
    module = build_model(str(CONFIGS / "switch"), dtype="float32", sequence_length=8).module
    for stack in (module.encoder, module.decoder):
        first, second = (description(block) for block in stack.block[1:3])
        assert first == second


@pytest.mark.cases(1)
@pytest.mark.parametrize("chosen", [2, 1])
def test_llama4_sends_tokens_to_the_experts_that_they_choose(chosen: int, in_chunks: OperatorGraph) -> None:
    """What that of transformers computes, of every expert with every token."""
    import transformers

    model = build_model(str(CONFIGS / "llama4"), dtype="float32", sequence_length=8, device="cpu")
    sparse, generator = model.module, torch.Generator().manual_seed(0)
    config = copy.deepcopy(sparse.config)
    config.num_experts_per_tok = chosen
    dense = transformers.Llama4ForCausalLM(config)
    for parameter in sparse.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    dense.load_state_dict(together(sparse, sparse.state_dict()))
    for layer in sparse.model.layers:
        layer.feed_forward.top_k = layer.feed_forward.router.top_k = chosen
    inputs = {name: torch.randint(0, 64, tensor.shape, generator=generator) for name, tensor in model.kwargs.items()}
    found = []
    for module in (sparse, dense):
        loss = module(**inputs).loss
        loss.backward()
        found.append({"loss": loss.detach(), **together(module, {n: p.grad for n, p in module.named_parameters()})})
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    graph = in_chunks
    rules = [rule_of(graph, op) for op in graph.operators if op.op == EXPERTS]
    assert [rule.format() for rule in rules] == ["b 1 h, b 1 1, b 1 1, e f h, e f h, e h f -> b 1 h"] * 4
    shared = [op for op in graph.operators if "shared_expert" in op.name and "linear" in op.op]
    assert {len(graph.types[op.operands[0]].shape) for op in shared} == {3}  # samples and positions apart


def test_gpt_oss_computes_what_that_of_transformers_computes() -> None:
    """Biases of experts and their bounded gate, and sinks of attention, in windows and without."""
    graph = traced("gpt-oss")
    rules = [rule_of(graph, op) for op in graph.operators if op.op == EXPERTS]
    assert [rule.format() for rule in rules] == ["b 1 h, b 1 k, b 1 k, e f h, e f h, e h f, e f, e f -> b 1 h"] * 4
    attention = [op for op in graph.operators if op.op == MASKED_ATTENTION]
    assert [dict(op.keywords)["back"] for op in attention] == [3, None, 3, None]
    assert all(op.operands[-1].endswith(".sinks") for op in attention)
    model = build_model(str(CONFIGS / "gpt-oss"), dtype="float32", sequence_length=8, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.module.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    inputs = {name: torch.randint(0, 64, tensor.shape, generator=generator) for name, tensor in model.kwargs.items()}
    found = []
    for experts, heads in ((AS_ONE_OPERATOR, model.module.config._attn_implementation), ("eager", "eager")):
        model.module.set_experts_implementation(experts)
        model.module.set_attn_implementation(heads)
        model.module.zero_grad()
        loss = model.module(**inputs).loss
        loss.backward()
        found.append([loss.detach(), *(one.grad for one in model.module.parameters())])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_capped_attention_is_one_operator_that_computes_what_transformers_computes() -> None:
    """Gemma 2, whose every second layer has a window. Without an operator for it scores were kept as tensors."""
    calls = [dict(op.keywords) for op in traced("gemma2").operators if op.op == MASKED_ATTENTION]
    assert [(call["back"], call["ahead"], call["cap"]) for call in calls] == [(3, 0, 0.5), (None, 0, 0.5)] * 2
    model = build_model(str(CONFIGS / "gemma2"), dtype="float32", sequence_length=8, device="cpu")
    inputs = {name: torch.randint(0, 64, tensor.shape) for name, tensor in model.kwargs.items()}
    found = []
    for kind in (None, "eager"):
        if kind is not None:
            model.module.set_attn_implementation(kind)
        model.module.zero_grad()
        loss = model.module(**inputs).loss
        loss.backward()
        found.append([loss.detach(), *(one.grad for one in model.module.parameters())])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
def test_attention_with_sinks_is_known_where_no_model_was_built() -> None:
    """As for a graph that was kept, or a plan file: to what runs it. A search of it does without PyTorch."""
    name = "planner.composed_attention.default"
    code = (
        "import sys, planner.sharding.rules; assert 'torch' not in sys.modules;"
        f" import runtime.ops.local.local_ops as ops; ops.resolve('{name}')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_attention_is_composed_where_an_architecture_has_no_other() -> None:
    calls = {op.op for op in traced("deberta").operators}
    assert ATTENTION not in calls
    assert "aten.softmax.int" in calls


def config_in(folder: Path, architecture: str, model_type: str, **content: Any) -> str:
    said = {"architectures": [architecture], "model_type": model_type, **content}
    (folder / "config.json").write_text(json.dumps(said))
    return str(folder)


LONGCAT = {
    "vocab_size": 64, "hidden_size": 32, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 16, "num_layers": 1,
    "num_attention_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "head_dim": 8, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 3,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.slow
def test_longcat_computes_what_that_of_transformers_computes(tmp_path: Path) -> None:
    """Without the matrices of identities, which are no part of the model; a second rewriting changes nothing."""
    import transformers

    built = build_model(
        config_in(tmp_path, "LongcatFlashForCausalLM", "longcat_flash", **LONGCAT),
        dtype="float32", sequence_length=8, device="cpu",
    )  # fmt: skip
    ours, generator = built.module, torch.Generator().manual_seed(0)
    experts_where_they_can(ours)
    theirs = transformers.LongcatFlashForCausalLM(transformers.LongcatFlashConfig(**LONGCAT))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    own = {name: tensor.shape for name, tensor in together(ours, ours.state_dict()).items()}
    copied = {n: t[: own[n][0]] if t.shape else t for n, t in theirs.state_dict().items()}
    for piece in pieces_of(ours):
        extent = ours.get_parameter(piece.ours).shape[piece.dim]
        copied[piece.ours] = copied[piece.theirs].narrow(piece.dim, piece.at, extent)
    ours.load_state_dict({name: copied[name] for name in ours.state_dict()})
    ids = torch.randint(0, 64, (2, 8), generator=generator)
    found = []
    for module in (ours, theirs):
        loss = module(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
        gradients = {name: one[: own[name][0]] for name, one in together(module, gradients).items()}
        found.append({"loss": loss.detach(), **gradients})
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert [op.op for op in trace(ours, (), built.kwargs).operators].count(EXPERTS) == 1


PHI = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "original_max_position_embeddings": 16, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("length", [8, 32])
def test_positions_whose_frequencies_depend_on_the_length(tmp_path: Path, length: int) -> None:
    """LongRoPE, as in Phi-4-mini: on both sides of the length from which frequencies are others."""
    import transformers

    scaling = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 9.0]}
    folder = config_in(tmp_path, "Phi3ForCausalLM", "phi3", **PHI, rope_scaling=scaling)
    built = build_model(folder, dtype="float32", sequence_length=length, device="cpu")
    theirs = transformers.Phi3ForCausalLM(transformers.AutoConfig.from_pretrained(folder))
    theirs.load_state_dict(together(built.module, built.module.state_dict()))
    ids = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(built.module(input_ids=ids).logits, theirs(input_ids=ids).logits)
    assert trace(built.module, (), built.kwargs).operators


def test_a_class_whose_name_transformers_writes_otherwise(tmp_path: Path) -> None:
    """The config of Phi-3.5-MoE says PhiMoE."""
    folder = config_in(tmp_path, "PHI3ForCausalLM", "phi3", **PHI)
    assert type(build_model(folder, dtype="float32", sequence_length=8).module).__name__ == "Phi3ForCausalLM"


def test_sequences_that_a_model_was_trained_on_are_its_default(tmp_path: Path) -> None:
    """BLOOM has no longest sequence."""
    sizes = {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32, "seq_length": 48}
    folder = config_in(tmp_path, "BloomForCausalLM", "bloom", **sizes)
    assert build_model(folder, dtype="float32").sequence_length == 48
    assert build_model(folder, dtype="float32", sequence_length=64).sequence_length == 64


def test_llama4_with_images_computes_with_tokens_alone(tmp_path: Path) -> None:
    text = json.loads((CONFIGS / "llama4" / "config.json").read_text())
    vision = {
        "hidden_size": 16, "image_size": 28, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1,
        "patch_size": 14, "projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16,
    }  # fmt: skip
    folder = config_in(tmp_path, "Llama4ForConditionalGeneration", "llama4", text_config=text, vision_config=vision)
    model = build_model(folder, dtype="float32", sequence_length=8, device="cpu")
    assert model.module(**model.kwargs).loss.shape == ()
    assert copy.deepcopy(model.module)(**model.kwargs).loss.shape == ()


def test_a_folder_a_file_and_a_length() -> None:
    folder, file = (build_model(str(path), dtype="float32", sequence_length=8) for path in paths("llama"))
    assert folder.reference != file.reference
    assert folder.module.state_dict().keys() == file.module.state_dict().keys()
    assert build_model(str(CONFIGS / "gpt2"), dtype="float32").sequence_length == 64
    with refused(ModelError, "config.json", 64, "--seq-len 65"):
        built("gpt2", sequence_length=65)
    with refused(ModelError, "--seq-len", "ViTForImageClassification"):
        built("vit", sequence_length=8)


def test_a_model_without_a_longest_sequence_takes_any(tmp_path: Path) -> None:
    """XLNet says -1 for as many positions as are asked for."""
    sizes = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16, "vocab_size": 32}
    content = {"architectures": ["XLNetLMHeadModel"], "model_type": "xlnet", **sizes}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert build_model(str(tmp_path), dtype="bfloat16", sequence_length=24).sequence_length == 24
    assert build_model(str(tmp_path), dtype="bfloat16").sequence_length == 128


@pytest.mark.thorough
@pytest.mark.slow
def test_experts_of_the_model_that_reads_tokens_are_operators(tmp_path: Path) -> None:
    """Of one that reads images, too, whose own file has none."""
    text = json.loads((CONFIGS / "deepseek-v3" / "config.json").read_text())
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    content = {
        "architectures": ["Kimi_K25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": {**text, "num_hidden_layers": 2, "first_k_dense_replace": 1},
        "vision_config": {"model_type": "kimi_k25_vision", **sizes},
        **{"image_token_id": 90, "video_token_id": 91, "projection_hidden_size": 32},
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    model = build_model(str(tmp_path), dtype="bfloat16", sequence_length=8)
    calls = [op.op for op in trace(model.module, model.args, model.kwargs).operators]
    assert calls.count("planner.experts.default") == 1
    assert not any("grouped" in call or "histc" in call for call in calls)


def paths(family: str) -> tuple[Path, Path]:
    return CONFIGS / family, CONFIGS / family / "config.json"


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        ("{", ("line 1",)),
        ("{}", ("architectures", "None")),
        ('{"architectures": ["WhisperForAudio"]}', ("WhisperForAudio", "--model package.module:factory")),
        ('{"architectures": ["LlamaForCausalLM"]}', ("transformers",)),
        ('{"architectures": ["MiniMaxM1ForCausalLM"]}', ("MiniMaxM1ForCausalLM is not known: transformers",)),
        (
            '{"architectures": ["MineForCausalLM"], "auto_map": {"AutoModelForCausalLM": "code.MineForCausalLM"}}',
            ("the code beside the config, which builds it, never runs here", "--model package.module:factory"),
        ),
        (
            '{"architectures": ["MoonshineForConditionalGeneration"], "model_type": "moonshine"}',
            ("MoonshineForConditionalGeneration reads input_values", "--model package.module:factory"),
        ),
    ],
)
def test_configs_that_cannot_be_built(tmp_path: Path, content: str, facts: tuple[object, ...]) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with refused(ModelError, path, *facts):
        build_model(str(path), dtype="float32")


def test_whisper_is_given_sound() -> None:
    """Two frames for each position of the encoder, and as many tokens as asked for."""
    kwargs = built("whisper").kwargs
    assert {name: tuple(tensor.shape[1:]) for name, tensor in kwargs.items()} == {
        "input_features": (8, 24), "decoder_input_ids": (8,), "labels": (8,),
    }  # fmt: skip


def test_no_such_file(tmp_path: Path) -> None:
    with refused(ModelError, tmp_path / "none.json", os.strerror(errno.ENOENT)):
        build_model(str(tmp_path / "none.json"), dtype="float32")


def test_without_transformers_the_way_to_get_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "transformers":
            raise ImportError("No module named 'transformers'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with refused(ModelError, "pip install 'parallel-planner[huggingface]'"):
        built("llama")


TEXT = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 40,
}  # fmt: skip
IMAGES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def composite(folder: Path, **text: Any) -> str:
    """A config of a model that reads images beside tokens, with those of both parts."""
    content = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": {**TEXT, **text},
        "vision_config": {**IMAGES, "image_size": 28, "patch_size": 14},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


def test_what_reads_images_beside_tokens_is_called_on_tokens(tmp_path: Path) -> None:
    """With the lengths and words of the part that reads them."""
    model = build_model(composite(tmp_path), dtype="float32")
    assert set(model.kwargs) == {"input_ids", "attention_mask", "labels"}
    assert model.sequence_length == 40
    assert dict(zip(model.kwargs, model.bounds, strict=True)) == {
        "input_ids": 96, "attention_mask": None, "labels": 96,
    }  # fmt: skip
    with refused(ModelError, tmp_path / "config.json", 40, 41):
        build_model(composite(tmp_path), dtype="float32", sequence_length=41)


def test_changes_reach_the_part_that_reads_tokens(tmp_path: Path) -> None:
    folder = composite(tmp_path)
    config = build_model(f"{folder}+num_hidden_layers=2+mm_tokens_per_image=4", dtype="float32").module.config
    assert (config.text_config.num_hidden_layers, config.vision_config.num_hidden_layers) == (2, 1)
    assert config.mm_tokens_per_image == 4
    with refused(ModelError, "--set num_layerz", "num_hidden_layers"):
        build_model(f"{folder}+num_layerz=2", dtype="float32")


def test_changes_do_not_reach_a_part_within_another() -> None:
    """As in Qwen2.5-Omni, whose thinker has the part that reads tokens."""
    import transformers

    config = transformers.Qwen2_5OmniConfig()
    with refused(ModelError, "--set num_hidden_layers"):
        _changed(config, {"num_hidden_layers": "2"}, Path("config.json"))


@pytest.mark.parametrize("wrong", [{"num_hidden_layers": 10**9}, {"hidden_size": -4}])
def test_parts_of_a_config_are_checked_before_they_are_built(tmp_path: Path, wrong: dict[str, int]) -> None:
    with refused(ModelError, tmp_path / "config.json", "text_config", *wrong):
        build_model(composite(tmp_path, **wrong), dtype="float32")


def test_sizes_may_differ_from_layer_to_layer() -> None:
    """As Gemma 3n lists them."""
    check_config({"text_config": {**TEXT, "intermediate_size": [48, 48, 96]}}, Path("config.json"))


def test_a_window_of_nothing_is_none(tmp_path: Path) -> None:
    """Transformers says 0 for a Qwen2-MoE that uses no window."""
    content = {
        **TEXT, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert set(build_model(str(tmp_path), dtype="float32").kwargs) == {"input_ids", "labels"}


@pytest.mark.parametrize(("family", "key"), [("t5-hf", "num_decoder_layers"), ("gpt2", "encoder_layers")])
def test_layers_have_a_limit_by_whatever_name(tmp_path: Path, family: str, key: str) -> None:
    with refused(ModelError, tmp_path / "config.json", key, 4096):
        build_model(changed(tmp_path, family, **{key: 10**9}), dtype="float32")


def test_configs_of_the_tests_drop_nothing() -> None:
    for family in FAMILIES:
        content = json.loads((CONFIGS / family / "config.json").read_text())
        assert not any(value for key, value in content.items() if "dropout" in key and "summary" not in key)


def changed(folder: Path, family: str, **content: Any) -> str:
    """A config with other content, in a folder."""
    config = json.loads((CONFIGS / family / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **content}))
    return str(folder)


def ours_from(theirs: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Weights of theirs under the names of ours. Where theirs rotate neighbours the rows of what is rotated are put in
    the order in which ours rotate halves: the last of every head, and the last of what is made beside the latent
    vector."""
    weights = {}
    for name, weight in theirs.items():
        stem, _, last = name.replace("shared_experts", "shared_expert").rpartition("experts.")
        if last == "gate_up_proj":
            gate, up = weight.chunk(2, dim=1)
            weights |= {f"{stem}experts.gate_proj": gate, f"{stem}experts.up_proj": up}
        else:
            weights[f"{stem}experts.{last}" if stem else last] = weight
    content = json.loads((CONFIGS / family / "config.json").read_text())
    turned = content.get("qk_rope_head_dim", 0)
    halves = [*range(0, turned, 2), *range(1, turned, 2)]
    for name in weights:
        if turned and name.endswith(("q_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight")):
            heads = 1 if "kv_a" in name else content["num_attention_heads"]
            rows = weights[name].unflatten(0, (heads, -1)).clone()
            rows[:, -turned:] = rows[:, -turned:][:, halves]
            weights[name] = rows.flatten(0, 1)
    return weights


@pytest.mark.parametrize("family", [*DEEPSEEK, "mixtral", "qwen3-moe"])
def test_mixtures_compute_what_those_of_hugging_face_compute(family: str) -> None:
    """With the weights of one in the other, and labels that are shifted where ours are not."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(str(CONFIGS / family))
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.normal_(std=0.2)  # so that attention is not the mean of all tokens, and choices differ
    ours = build_model(str(CONFIGS / family), dtype="float32", device="cpu", sequence_length=8).module
    missing, unexpected = ours.load_state_dict(ours_from(theirs.state_dict(), family), strict=False)
    of_buffers = ("model.cos", "model.sin", "router.bias_steps", "router.loads")
    assert [name for name in missing if not name.endswith(of_buffers)] == []
    assert [name for name in unexpected if not name.endswith("e_score_correction_bias")] == []
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    tokens = torch.randint(96, (2, 8))
    theirs.config.output_router_logits = False
    logits = theirs(input_ids=tokens, output_router_logits=False).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
    torch.testing.assert_close(ours.eval()(tokens, tokens.roll(-1, 1)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", DEEPSEEK)
def test_parameters_of_deepseek_are_those_of_hugging_face(family: str) -> None:
    """As many with the same names and shapes, at sizes that are released; without a weight."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(family.replace("-", "_"), num_experts_per_tok=6, qk_nope_head_dim=96)
    config.num_hidden_layers, config.architectures = 5, [f"{family.title().replace('-', '')}ForCausalLM"]
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    dimensions = deepseek_of(config, config.architectures[0], 16, Path(family), stretched)
    with torch.device("meta"):
        ours = Deepseek(DeepseekConfig(**dimensions))
    wanted = {**ours_from(dict(theirs.named_parameters()), family)}
    assert {n: w.shape for n, w in ours.named_parameters()} == {n: w.shape for n, w in wanted.items()}


@pytest.mark.parametrize(
    ("family", "content", "facts"),
    [
        ("mixtral", {"sliding_window": 4}, ("sliding_window", 4, 8)),
        ("mixtral", {"hidden_act": "gelu"}, ("hidden_act", "gelu", "MixtralForCausalLM", "silu")),
        ("qwen3-moe", {"mlp_only_layers": [1]}, ("mlp_only_layers [1]",)),
        ("qwen3-moe", {"decoder_sparse_step": 2}, ("decoder_sparse_step", 2, "Qwen3MoeForCausalLM", 1)),
        (
            "deepseek-v2",
            {"norm_topk_prob": True},
            ("norm_topk_prob", True, "DeepseekV2ForCausalLM", False),
        ),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, ("topk_method", "noaux_tc", "greedy", "group_limited_greedy")),
        ("deepseek-v2", {"seq_aux": False}, ("aux_loss_alpha", 0.001, "seq_aux")),
        ("deepseek-v2", {"num_experts_per_tok": None}, ("num_experts_per_tok", "DeepseekV2ForCausalLM")),
        ("deepseek-v3", {"num_key_value_heads": 2}, ("num_key_value_heads=2", "num_attention_heads=4")),
        ("deepseek-v3", {"moe_layer_freq": 2}, ("moe_layer_freq", 2, "DeepseekV3ForCausalLM", 1)),
        ("deepseek-v3", {"n_group": 3}, (8, 3, "n_group")),
        ("deepseek-v3", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ("dynamic", "default", "linear", "yarn")),
    ],
)
def test_mixtures_that_are_not_built_here(
    tmp_path: Path, family: str, content: dict[str, Any], facts: tuple[object, ...]
) -> None:
    with refused(ModelError, *facts):
        build_model(changed(tmp_path, family, **content), dtype="bfloat16", sequence_length=8)


def test_the_loss_that_evens_out_loads_is_added_where_the_config_asks_for_it() -> None:
    losses = [bool(built(family).module.model.balanced) for family in ("mixtral", "qwen3-moe", *DEEPSEEK)]
    assert losses == [True, False, True, False]


def test_a_config_with_a_copy_of_a_class_of_transformers_is_read_as_of_that_class(tmp_path: Path) -> None:
    """Kimi K2 brings the code of DeepSeek-V3, under a model_type of its own."""
    code = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    copied = changed(tmp_path, "deepseek-v3", model_type="kimi_k2", auto_map=code)
    names = [
        [name for name, _ in build_model(each, dtype="float32", sequence_length=8).module.named_parameters()]
        for each in (copied, str(CONFIGS / "deepseek-v3"))
    ]
    assert names[0] == names[1]


def test_a_model_type_that_nobody_knows_is_that_of_the_class_which_is_named(tmp_path: Path) -> None:
    config = changed(tmp_path, "deepseek-v3", model_type="kimi_k2")
    made = from_config(config, batch=1, device="meta", sequence_length=8)
    assert type(made.module) is type(built("deepseek-v3").module)
    (note,) = (note for note in made.notes if "knows no" in note)
    assert (
        note == f"{config}/config.json: transformers knows no model_type 'kimi_k2'; it is read as DeepseekV3ForCausalLM"
    )


def test_what_stretches_positions_is_taken_from_the_config(tmp_path: Path) -> None:
    stretched = built("deepseek-v3").module.model.layers[0].self_attn.scale
    assert stretched == pytest.approx((0.1 * math.log(4) + 1) ** 2 / math.sqrt(12))
    plain = build_model(changed(tmp_path, "deepseek-v3", rope_scaling=None), dtype="float32", sequence_length=8)
    assert plain.module.model.layers[0].self_attn.scale is None


@pytest.mark.parametrize(
    ("family", "content", "said"),
    [
        ("llama", {"num_attention_heads": "four"}, "num_attention_heads: 'four' is not a whole number"),
        (
            "llama",
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            "is not a multiple of the number of attention heads (3)",
        ),
        ("llama", {"num_key_value_heads": 3}, "attention heads are not a multiple of the 3 key and value heads"),
        ("llama", {"hidden_act": "sillu"}, "hidden_act: unknown activation 'sillu'; did you mean silu"),
        ("llama", {"hidden_size": 0}, "hidden_size: 0 is less than 1"),
        ("llama", {"hidden_size": 10**12}, "hidden_size: 1000000000000 is more than 2147483648"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000 is more than 4096"),
        ("llama", {"rms_norm_eps": -1e-5}, "rms_norm_eps: -1e-05 is not more than 0"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings: 'no' is not true or false"),
        ("llama", {"model_type": "gpt2"}, "model_type 'gpt2' and architecture LlamaForCausalLM do not go together"),
        ("llama", {"pad_token_id": "x"}, "transformers cannot read it: StrictDataclassFieldValidationError"),
        ("llama", {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "transformers cannot"),
        ("gpt2", {"n_head": 5}, "is not a multiple of the 5 attention heads"),
        ("gpt2", {"activation_function": "relu9"}, "activation_function: unknown activation 'relu9'"),
        ("mixtral", {"num_experts_per_tok": 99}, "a token takes 99 experts"),
        ("deepseek-v3", {"topk_group": 99}, "a token takes 99 groups"),
        ("vit", {"image_size": [1, 2, 3]}, "image_size"),
    ],
)
def test_what_no_model_can_have_is_refused_in_one_line(
    tmp_path: Path, family: str, content: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError) as caught:
        build_model(changed(tmp_path, family, **content), dtype="float32")
    message = str(caught.value)
    assert said in message
    assert "config.json" in message
    assert "\n" not in message


def test_a_fault_of_ours_is_not_taken_for_one_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: object) -> bool:
        raise KeyError("ours")

    monkeypatch.setattr("planner.models.huggingface.from_config.has_window", faulty)
    with pytest.raises(KeyError, match="ours"):
        build_model(str(CONFIGS / "llama"), dtype="float32")


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> OperatorGraph:
    """Gate and up of gpt-oss lie in turn in one weight."""
    kinds = ["sliding_attention", "full_attention"]
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "layer_types": kinds}
    model = build_model(
        changed(tmp_path_factory.mktemp("gpt-oss"), "gpt-oss", **sizes), dtype="bfloat16", sequence_length=8
    )
    return trace(model.module, model.args, model.kwargs)


@pytest.mark.parametrize("fp8", [Fp8(recipe="tensorwise", experts=True), Fp8(recipe="tensorwise", dispatch=True)])
def test_experts_whose_matrices_are_parts_of_a_weight_are_not_in_fp8(fp8: Fp8, in_turn: OperatorGraph) -> None:
    with refused(RequestError, "model.layers.0.mlp.experts/experts", "made of weights"):
        with_fp8(in_turn, (), fp8)


def test_layers_whose_kinds_a_config_lists_can_be_fewer(tmp_path: Path) -> None:
    """LFM2-MoE has no other key from which the kinds of its layers follow."""
    content = {
        "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe",
        "layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4, "num_dense_layers": 1,
        "hidden_size": 16, "intermediate_size": 16,
        "moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1, "vocab_size": 64,
        "num_attention_heads": 2, "num_key_value_heads": 1, "conv_L_cache": 3,
        "max_position_embeddings": 16, "pad_token_id": 0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content))
    module = build_model(f"{tmp_path}+num_hidden_layers=3", dtype="bfloat16").module
    assert module.config.layer_types == ["conv", "full_attention", "conv"]


def test_layers_can_be_fewer_where_a_config_words_their_pattern(tmp_path: Path) -> None:
    """EXAONE 4 lists the kinds of its layers beside a pattern, "LLLG", that transformers cannot read."""
    content = {
        "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "sliding_window_pattern": "LG",
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "hidden_size": 16,
        "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 64,
        "sliding_window": 4, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content))
    module = build_model(f"{tmp_path}+num_hidden_layers=2", dtype="bfloat16").module
    assert module.config.layer_types == ["sliding_attention", "full_attention"]
