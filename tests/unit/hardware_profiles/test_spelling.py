"""Suggestions are near what was written, or there are none."""

import pytest

from hardware_profiles.spelling import nearest_names

MODELS = ("gpt2", "gpt3-13b", "gpt3-175b", "llama-tiny", "llama2-70b", "llama405b", "llama70b", "llama8b", "t5-tiny")
HARDWARE = ("a100-40gb", "a100-80gb", "cpu", "h100-80gb", "h800-80gb", "v100-32gb")
OPTIONS = ("--cluster", "--data", "--for", "--imbalance", "--lora", "--pipeline", "--tensor", "--top", "--zero")


@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("llma70b", MODELS, ["llama70b"]),
        ("gpt3", MODELS, ["gpt3-13b", "gpt3-175b"]),
        ("LLAMA-TINY+x", MODELS, ["llama-tiny"]),
        ("banana", MODELS, []),
        ("h10", HARDWARE, ["h100-80gb"]),
        ("a100x", HARDWARE, ["a100-40gb", "a100-80gb"]),
        ("tpu", HARDWARE, []),
        ("--tensro", OPTIONS, ["--tensor"]),
        ("--pipe-line", OPTIONS, ["--pipeline"]),
        ("--banana", OPTIONS, []),
        ("--foo", OPTIONS, []),
        ("--colour", OPTIONS, []),
        ("step_second", ("peak_bytes", "step_seconds"), ["step_seconds"]),
        ("num_layerz", ("hidden_size", "num_hidden_layers"), ["num_hidden_layers"]),
        ("mpl", ("mlp", "named"), ["mlp"]),
        ("*q_prj*", ("layers.0.q_proj", "layers.0.k_proj"), ["layers.0.q_proj"]),
        ("", MODELS, []),
    ],
)
def test_only_what_is_near_is_suggested(name: str, known: tuple[str, ...], near: list[str]) -> None:
    assert nearest_names(name, known) == near
