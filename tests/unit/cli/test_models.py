"""`plan models`, and models that differ from a known one: `--set`."""

from pathlib import Path
from typing import Any

import pytest

from planner.models.zoo import ZOO
from planner.plan.file import load_plan

TINY = ("--model", "llama-tiny", "--hardware", "cpu", "--devices", "2", "--mesh", "2", "--micro-batches", "1")


def test_the_list_fits_on_a_narrow_terminal(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = plan("models").out.splitlines()
    assert len(lines) == len(ZOO) + 2  # a head and a hint: no row is broken
    assert max(map(len, lines)) <= 80
    row = next(line for line in lines if line.startswith("llama8b "))
    assert row.split() == ["llama8b", "llama", "8.03B", "32", "4096", "32", "8192"]


def test_one_model_with_its_source(plan: Any) -> None:
    shown = plan("models", "llama8b").out
    assert "8,030,261,248" in shown
    assert "arXiv 2407.21783" in shown
    content = plan.json("models", "llama8b+num_layers=16")
    assert (content["dimensions"]["num_layers"], content["parameters"]) == (16, 4_540_469_248)
    every = plan.json("models")["models"]
    assert [one["model"] for one in every] == list(ZOO)
    assert list(every[0]) == ["model", "family", "parameters", "dimensions", "source"]
    assert "did you mean llama8b" in plan.refused("models", "lama8b")


@pytest.mark.slow
@pytest.mark.thorough
def test_a_changed_model_is_planned_and_built_again(plan: Any, here: Path) -> None:
    content = plan.json(*TINY, "--set", "num_layers=2", "--set", "ffn_size=256", "-o", "plan.json")
    name = "llama-tiny+ffn_size=256+num_layers=2"
    assert (content["model"], load_plan(here / "plan.json").model.reference) == (name, name)
    assert plan("verify", "plan.json").code == 0
    assert name in plan("show", "plan.json").out
    assert plan(*TINY, "--set", "num_layers=2", "-q").code == 0
    assert (here / "llama-tiny-num_layers-2-2.json").is_file()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("num_layer=2", "did you mean num_layers"),
        ("num_layers", "--set 'num_layers': write KEY=VALUE"),
        ("num_layers=two", "num_layers of llama-tiny is a whole number"),
    ],
)
def test_what_cannot_be_set_is_one_line(plan: Any, change: str, words: str) -> None:
    assert words in plan.refused(*TINY, "--set", change)
