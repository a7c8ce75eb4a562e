"""Models of Hugging Face from a config.json: built without weights, traced, and every operator has a rule."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from planner.errors import ModelError
from planner.graph.kinds import find_blocks
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.models.zoo import BuiltModel, build_model
from planner.sharding.rescale import rescale_batch
from planner.sharding.rules import rule_of

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FAMILIES = ("bert-hf", "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3-moe", "t5-hf", "vit")
ATTENTION = "aten.scaled_dot_product_attention.default"


def built(family: str, **options: Any) -> BuiltModel:
    length = {} if family == "vit" else {"sequence_length": 8}
    return build_model(str(CONFIGS / family), dtype="bfloat16", **{**length, **options})


def traced(family: str) -> OperatorGraph:
    model = built(family)
    return trace(model.module, model.args, model.kwargs)


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


@pytest.mark.parametrize(("family", "masks"), [("llama", False), ("gpt2", False), ("mistral", True), ("bert-hf", True)])
def test_masks_are_left_out_where_training_leaves_them_out(family: str, masks: bool) -> None:
    graph = traced(family)
    calls = [op for op in graph.operators if op.op == ATTENTION]
    assert calls
    assert all((len(op.operands) == 4) == masks for op in calls)
    causal = [dict(op.keywords).get("is_causal", len(op.arguments) > 5 and op.arguments[5]) for op in calls]
    assert all(causal) != masks


def test_a_folder_a_file_and_a_length() -> None:
    folder, file = (build_model(str(path), dtype="float32", sequence_length=8) for path in paths("llama"))
    assert folder.reference != file.reference
    assert folder.module.state_dict().keys() == file.module.state_dict().keys()
    assert build_model(str(CONFIGS / "gpt2"), dtype="float32").sequence_length == 64
    with pytest.raises(ModelError, match=r"gpt2.config.json has positions for 64 tokens; --seq-len 65 is longer"):
        built("gpt2", sequence_length=65)
    with pytest.raises(ModelError, match=r"--seq-len does not apply to .*vit: ViTForImageClassification reads images"):
        built("vit", sequence_length=8)


def paths(family: str) -> tuple[Path, Path]:
    return CONFIGS / family, CONFIGS / family / "config.json"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("{}", "'architectures' must name the class to build, .* it is None"),
        ('{"architectures": ["WhisperForAudio"]}', "WhisperForAudio is not one that is built here .* write a factory"),
        ('{"architectures": ["LlamaForCausalLM"]}', "transformers cannot read it"),
    ],
)
def test_configs_that_cannot_be_built(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ModelError, match=message) as raised:
        build_model(str(path), dtype="float32")
    assert str(path) in str(raised.value)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*none.json: No such file"):
        build_model(str(tmp_path / "none.json"), dtype="float32")


def test_without_transformers_the_way_to_get_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "transformers":
            raise ImportError("No module named 'transformers'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModelError, match=r"pip install 'parallel-planner\[huggingface\]'"):
        built("llama")


def test_configs_of_the_tests_drop_nothing() -> None:
    for family in FAMILIES:
        content = json.loads((CONFIGS / family / "config.json").read_text())
        assert not any(value for key, value in content.items() if "dropout" in key and "summary" not in key)


def changed(folder: Path, family: str, **content: Any) -> str:
    """A config with other content, in a folder."""
    config = json.loads((CONFIGS / family / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **content}))
    return str(folder)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_mixtures_compute_what_those_of_hugging_face_compute(family: str) -> None:
    """With the weights of one in the other, and labels that are shifted where ours are not."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(str(CONFIGS / family))
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    ours = build_model(str(CONFIGS / family), dtype="float32", device="cpu", sequence_length=8).module
    weights = theirs.state_dict()
    for name in list(weights):
        if name.endswith("experts.gate_up_proj"):
            gate_up = weights.pop(name).chunk(2, dim=1)
            stem = name.removesuffix("gate_up_proj")
            weights |= dict(zip((f"{stem}gate_proj", f"{stem}up_proj"), gate_up, strict=True))
    missing, unexpected = ours.load_state_dict(weights, strict=False)
    assert ([name for name in missing if name not in ("model.cos", "model.sin")], unexpected) == ([], [])
    tokens = torch.randint(96, (2, 8))
    theirs.config.output_router_logits = False
    logits = theirs(input_ids=tokens, output_router_logits=False).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
    torch.testing.assert_close(ours.eval()(tokens, tokens.roll(-1, 1)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "content", "said"),
    [
        ("mixtral", {"sliding_window": 4}, "sliding_window 4 is shorter than the sequence of 8 tokens"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; MixtralForCausalLM is built here with 'silu'"),
        ("qwen3-moe", {"mlp_only_layers": [1]}, r"mlp_only_layers \[1\]: only the first layers"),
        ("qwen3-moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
    ],
)
def test_mixtures_that_are_not_built_here(tmp_path: Path, family: str, content: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        build_model(changed(tmp_path, family, **content), dtype="bfloat16", sequence_length=8)


def test_the_loss_that_evens_out_loads_is_added_where_the_config_asks_for_it() -> None:
    losses = [bool(built(family).module.model.balanced) for family in ("mixtral", "qwen3-moe")]
    assert losses == [True, False]
