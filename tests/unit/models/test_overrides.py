"""Models that differ from a known one in some dimensions, by name."""

from pathlib import Path

import pytest

from planner.errors import ModelError
from planner.models.overrides import changed_reference, split_reference
from planner.models.zoo import ZOO, build_model, parameter_count, zoo_entry
from tests.refusals import refused

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize(
    ("reference", "changes", "name"),
    [
        ("llama8b", (), "llama8b"),
        ("llama8b", ("num_layers=40", "hidden_size=512"), "llama8b+hidden_size=512+num_layers=40"),
        ("llama8b+num_layers=40", ("num_layers=4", "num_layers=8"), "llama8b+num_layers=8"),
        ("resnet50", ("blocks = 3, 4,23,3",), "resnet50+blocks=3x4x23x3"),
        ("configs/llama", ("num_hidden_layers=4",), "configs/llama+num_hidden_layers=4"),
    ],
)
def test_what_is_changed_is_part_of_the_name(reference: str, changes: tuple[str, ...], name: str) -> None:
    assert changed_reference(reference, changes) == name
    bare, found = split_reference(name)
    assert bare == reference.partition("+")[0]
    assert changed_reference(bare, [f"{key}={value}" for key, value in found.items()]) == name


def test_a_changed_model_of_the_zoo_is_built() -> None:
    built = build_model("llama-tiny+num_layers=6+tied_embeddings=yes+rope_theta=1e4", dtype="float32")
    assert len(built.module.model.layers) == 6
    assert built.module.lm_head.weight is built.module.model.embed_tokens.weight
    assert built.reference == "llama-tiny+num_layers=6+tied_embeddings=yes+rope_theta=1e4"
    assert parameter_count(built.reference) != parameter_count("llama-tiny")
    assert dict(zoo_entry("resnet50+blocks=3,4,23,3").dimensions)["blocks"] == (3, 4, 23, 3)
    assert parameter_count("resnet50+blocks=3x4x23x3") == 44_549_160  # ResNet-101, as torchvision lists it
    assert build_model("gpt-tiny+sequence_length=64", dtype="float32").sequence_length == 64


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        (
            "llama-tiny+num_layer=4",
            "--set num_layer: unknown dimension of llama-tiny 'num_layer'; did you mean num_layers",
        ),
        ("llama-tiny+num_layers=four", "--set num_layers=four: num_layers of llama-tiny is a whole number"),
        ("llama-tiny+num_layers=4.5", "num_layers of llama-tiny is a whole number"),
        ("llama-tiny+tied_embeddings=2", "tied_embeddings of llama-tiny is yes or no"),
        ("llama-tiny+rope_theta=much", "rope_theta of llama-tiny is a number"),
        ("resnet50+blocks=3y4", "blocks of resnet50 is whole numbers, as in 3x4x6"),
        ("deepseek-tiny+groups_by=3", "groups_by of deepseek-tiny is 1 or 2"),
        ("llama-tiny+num_layers", "unknown model 'llama-tiny+num_layers'; did you mean llama-tiny"),
        ("llama-tiny+num_heads=0", "--set num_heads=0: num_heads of llama-tiny is 1 or more"),
        ("llama-tiny+num_layers=-3", "--set num_layers=-3: num_layers of llama-tiny is 1 or more"),
        (
            "llama-tiny+num_kv_heads=3",
            "num_kv_heads=3 does not divide num_heads=8; the nearest legal values are 2 and 4",
        ),
        ("llama-tiny+hidden_size=7", "hidden_size=7 is less than num_heads=8"),
        ("mixtral-tiny+num_experts=-2", "num_experts of mixtral-tiny is 0 or more"),
        ("lama-tiny+num_layers=2", "unknown model 'lama-tiny'; did you mean llama-tiny"),
        ("some.module:factory+num_layers=2", "--set does not apply to some.module:factory"),
    ],
)
def test_what_cannot_be_changed_is_named(reference: str, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        build_model(reference, dtype="float32")
    assert words in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("family", "layers"), [("llama", "num_hidden_layers"), ("llama4", "num_hidden_layers"), ("gpt2", "n_layer")]
)
def test_a_changed_config_is_built(family: str, layers: str) -> None:
    reference = f"{CONFIGS / family}+{layers}=3"
    built = build_model(reference, dtype="float32", sequence_length=8)
    assert built.reference == reference
    numbers = {part for name, _ in built.module.named_parameters() for part in name.split(".") if part.isdigit()}
    assert numbers == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ("num_hidden_layer=3", ("--set num_hidden_layer", "num_hidden_layers")),
        ("num_hidden_layers=three", ("--set num_hidden_layers=three",)),
        ("tie_word_embeddings=3", ("--set tie_word_embeddings=3", "yes", "no")),
    ],
)
def test_a_config_that_cannot_be_changed_so_is_named(change: str, facts: tuple[object, ...]) -> None:
    with refused(ModelError, *facts):
        build_model(f"{CONFIGS / 'llama'}+{change}", dtype="float32", sequence_length=8)


def test_names_of_the_zoo_are_their_own() -> None:
    assert all(split_reference(name) == (name, {}) for name in ZOO)
