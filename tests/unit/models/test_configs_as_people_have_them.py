"""Models of transformers that are rewritten so that they can be traced compute what transformers computes, and what a
config says and its model leaves out is named."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from planner.errors import ModelError
from planner.models.huggingface.equivalents import note_on_part, rewritten
from planner.models.huggingface.from_config import _as_transformers_writes, from_config
from planner.models.huggingface.notes import notes_on_inputs, notes_on_keys
from planner.models.huggingface.taken_apart import together
from planner.models.zoo import build_model
from tests.refusals import refused

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def made(family: str, length: int | None = None) -> Any:
    torch.manual_seed(0)
    return from_config(str(CONFIGS / family), batch=3, device="cpu", sequence_length=length)


def changed(folder: Path, family: str, **changes: Any) -> str:
    content = json.loads((CONFIGS / family / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **changes}))
    return str(folder)


def drawn(inputs: Any, bounds: tuple[int | None, ...]) -> dict[str, Any]:
    """Inputs with random content in place of zeros."""
    known = dict(zip((key for key, one in inputs.items() if isinstance(one, torch.Tensor)), bounds, strict=True))
    return {
        key: one
        if not isinstance(one, torch.Tensor) or key == "attention_mask"
        else torch.randint(0, known[key] or 1, one.shape)
        if known[key]
        else torch.randn(one.shape)
        for key, one in inputs.items()
    }


def original(name: str, module: Any, *, training: bool) -> Any:
    """The class of transformers as it is, with the weights of `module`."""
    made = getattr(transformers, name)._from_config(module.config, attn_implementation="sdpa")
    made.set_experts_implementation("eager") if made._can_set_experts_implementation() else None
    made.load_state_dict(together(module, module.state_dict()))
    return made.train(training)


@pytest.mark.parametrize("family", ["gemma3n", "siglip", "clip"])
def test_a_rewritten_model_computes_what_that_of_transformers_computes(family: str) -> None:
    model = made(family, 16)
    for name, one in model.module.named_parameters():
        if "coefs" in name:
            torch.nn.init.uniform_(one, -0.25, 0.25)  # within the limit, where gradients are the same, too
    inputs = drawn(model.inputs, model.bounds)
    other = original(type(model.module).__name__, model.module, training=True)
    losses = [each(**inputs).loss for each in (model.module, other)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    theirs = dict(other.named_parameters())
    for name, one in model.module.named_parameters():
        if theirs[name].grad is not None:
            torch.testing.assert_close(one.grad, theirs[name].grad, msg=name)


def test_coefficients_beyond_the_limit_are_clipped_in_copies() -> None:
    model = made("gemma3n", 16)
    for name, one in model.module.named_parameters():
        if "prediction_coefs" in name:
            torch.nn.init.constant_(one, 2.0)
    inputs = drawn(model.inputs, model.bounds)
    other = original("Gemma3nForCausalLM", model.module, training=True)
    torch.testing.assert_close(model.module(**inputs).loss, other(**inputs).loss)
    kept = next(one for name, one in model.module.named_parameters() if "prediction_coefs" in name)
    assert kept.flatten()[0].item() == 2.0


@pytest.mark.parametrize(("family", "noise"), [("phimoe", "input_jitter_noise 0.01"), ("dbrx", "moe_jitter_eps 0.01")])
def test_a_router_that_draws_sends_tokens_where_it_does_in_evaluation(family: str, noise: str) -> None:
    model = made(family, 16)
    inputs = drawn(model.inputs, model.bounds)
    found = model.module(**inputs).loss
    other = original(type(model.module).__name__, model.module, training=False)  # which shares the config
    torch.testing.assert_close(found, other(**inputs).loss)
    assert any(noise in note for note in model.notes)


def test_layers_with_methods_of_ours_are_copied_and_pickled() -> None:
    model = made("gemma3n", 16)
    again = pickle.loads(pickle.dumps(model.module))
    inputs = drawn(model.inputs, model.bounds)
    torch.testing.assert_close(again(**inputs).loss, model.module(**inputs).loss)


def test_sound_draws_nothing_and_says_so() -> None:
    model = made("wav2vec2", 20)
    inputs = drawn(model.inputs, model.bounds)
    assert inputs["input_values"].shape == (3, 172)  # (20 - 1) x 2 + 4 = 42, (42 - 1) x 4 + 8
    assert model.module(**inputs).logits.shape[1] == 20
    assert torch.equal(model.module(**inputs).loss, model.module(**inputs).loss)
    assert any("layerdrop 0.1" in note and "mask_time_prob 0.05" in note for note in model.notes)


def test_pairs_and_classes_have_their_inputs() -> None:
    clip, classes = made("clip"), made("bert-classifier", 8)
    assert clip.inputs["input_ids"].shape == (3, 16)
    assert clip.inputs["pixel_values"].shape == (3, 3, 32, 32)
    assert classes.inputs["labels"].shape == (3,)
    assert classes.bounds == (64, None, 3)


def test_one_number_for_each_sample_is_a_regression(tmp_path: Path) -> None:
    reward = changed(tmp_path, "bert-classifier", id2label={"0": "reward"}, label2id={"reward": 0})
    model = from_config(reward, batch=3, device="cpu", sequence_length=8)
    assert model.inputs["labels"].dtype == torch.float32
    assert model.module.config.problem_type == "regression"
    assert made("bert-classifier", 8).module.config.problem_type == "single_label_classification"


def test_an_architecture_with_code_of_its_own_is_built_as_one_that_computes_the_same() -> None:
    model = made("ling", 16)
    assert type(model.module).__name__ == "Glm4MoeForCausalLM"
    layer = model.module.model.layers[1]
    assert layer.mlp.gate.weight.shape == (8, 32)
    assert layer.self_attn.q_norm.weight.shape == (8,)
    assert any("num_nextn_predict_layers 1" in note for note in model.notes)


@pytest.mark.parametrize(
    ("family", "changes", "facts"),
    [
        ("ling", {"score_function": "softmax"}, ("score_function", "'softmax'", "'sigmoid'")),
        ("nemotron-h", {"num_hidden_layers": 9}, ("num_hidden_layers", 9, "layers_block_type", 4)),
        ("llama", {"num_hidden_layers": 3, "hybrid_override_pattern": "M-"}, ("num_hidden_layers", 3, 2)),
        ("llama", {"num_hidden_layers": 2, "layer_types": ["full_attention"]}, ("num_hidden_layers", "layer_types", 1)),
        ("bert-hf", {"architectures": ["BertModel"]}, ("BertModel", "BertForMaskedLM", "loss")),
        ("wav2vec2", {"architectures": ["Wav2Vec2ForPreTraining"]}, ("Wav2Vec2ForCTC", "Gumbel")),
        ("qwen3", {"architectures": ["Qwen3ForSequenceClassification"]}, ("--set pad_token_id=0",)),
        ("vit", {"architectures": ["DINOv3ViTModel"], "model_type": "dinov3_vit"}, ("DINOv3ViTModel", "loss")),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_reason(
    family: str, changes: dict[str, Any], facts: tuple[object, ...], tmp_path: Path
) -> None:
    with refused(ModelError, *facts):
        build_model(changed(tmp_path, family, **changes), dtype="bfloat16", sequence_length=8)


@pytest.mark.parametrize(
    ("changes", "length", "said"),
    [
        ({"max_position_embeddings": 10_485_760}, None, "10,485,760"),
        ({"max_position_embeddings": 10_485_760}, 8, ""),
        ({"alibi_slopes_of_mine": 3}, 8, "alibi_slopes_of_mine 3"),
        ({"quantization_config": {"quant_method": "fp8"}}, 8, "quantization_config"),
        ({"auto_map": {"AutoModel": "code.Mine"}, "torch_dtype": "bfloat16", "_name_or_path": "here"}, 8, ""),
    ],
)
def test_notes_name_what_is_long_and_what_is_not_read(
    changes: dict[str, Any], length: int | None, said: str, tmp_path: Path
) -> None:
    built = build_model(changed(tmp_path, "llama", **changes), dtype="bfloat16", sequence_length=length)
    assert (said in " ".join(built.notes)) if said else not built.notes


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("ling", {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "aux_loss_alpha": 0.001}, ""),
        ("ling", {"scoring_func": "softmax", "use_mtp": True}, "scoring_func 'softmax': it"),
        ("llama", {"use_mtp": True}, "use_mtp True"),
        ("llama", {"use_qk_norm": True}, "use_qk_norm True"),
        ("bert-hf", {"position_embedding_type": "absolute"}, ""),
        ("bert-hf", {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ("gpt-oss", {"experts_per_token": 2, "initial_context_length": 64}, ""),
    ],
)
def test_a_key_is_named_only_where_another_value_is_computed(
    family: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    built = build_model(changed(tmp_path, family, **changes), dtype="bfloat16", sequence_length=8)
    named = " ".join(note for note in built.notes if "does not read" in note)
    assert (said in named) if said else not named


@pytest.mark.thorough
@pytest.mark.slow
def test_configs_of_the_tests_have_no_keys_that_nothing_reads() -> None:
    for family in ("llama", "gemma2", "qwen3-next", "deepseek-v3", "whisper", "zamba2", "gpt-oss"):
        built = build_model(str(CONFIGS / family), dtype="bfloat16", sequence_length=8)
        assert not [note for note in built.notes if "does not read" in note], family


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        ({"_class_name": "FluxTransformer2DModel"}, ("diffusers", "'FluxTransformer2DModel'")),
        ({"architectures": ["Qwen3OmniMoeForConditionalGeneration"]}, ("thinker_config", "missing")),
    ],
)
def test_configs_of_another_kind_are_refused(
    content: dict[str, Any], facts: tuple[object, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    with refused(ModelError, *facts):
        build_model(str(tmp_path), dtype="bfloat16", sequence_length=8)


def test_of_a_model_that_only_generates_the_part_with_a_loss_is_planned() -> None:
    name, content = rewritten(
        "Qwen3OmniMoeForConditionalGeneration", {"thinker_config": {"text_config": {"vocab_size": 8}}}, Path("c.json")
    )
    assert name == "Qwen3OmniMoeThinkerForConditionalGeneration"
    assert content["text_config"] == {"vocab_size": 8}
    assert "thinker_config" in next(note_on_part("Qwen3OmniMoeForConditionalGeneration", Path("c.json")))


def test_names_of_classes_may_differ_in_letters_and_underscores() -> None:
    assert _as_transformers_writes(transformers, "KimiK25ForConditionalGeneration") == (
        "Kimi_K25ForConditionalGeneration"
    )


@pytest.mark.thorough
def test_a_note_says_that_images_are_left_out(tmp_path: Path) -> None:
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = {"text_config": {**text, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64}}
    seen = {**text, "image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"}
    said = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 4}
    (tmp_path / "config.json").write_text(json.dumps({**said, **sizes, "vision_config": seen}))
    built = build_model(str(tmp_path), dtype="bfloat16", sequence_length=8)
    assert any("tokens alone, without pixel_values" in note for note in built.notes)
    assert not any("tokens alone" in note for note in made("clip", 8).notes)


def test_a_note_names_the_images_that_a_class_is_not_given() -> None:
    class Seeing:
        def forward(self, input_ids: Any, pixel_values: Any = None, labels: Any = None) -> None: ...

    (note,) = notes_on_inputs(Seeing, ("input_ids", "labels"), Path("config.json"))
    assert "Seeing is planned on tokens alone, without pixel_values" in note
    assert not list(notes_on_inputs(Seeing, ("input_ids", "pixel_values"), Path("config.json")))


def test_notes_ask_configs_for_nothing_that_warns() -> None:
    """transformers prints a line whenever it is asked for `torch_dtype`, which most published configs have."""

    class Config:
        torch_dtype = property(lambda _: pytest.fail("asked for torch_dtype"))

        def get_text_config(self) -> "Config":
            return self

    assert list(notes_on_keys({"torch_dtype": "bfloat16"}, Config(), torch.nn.Linear(1, 1), Path("config.json"))) == []
