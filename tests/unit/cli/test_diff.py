"""`plan diff`: the differences between two plans, and what each of them costs."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from planner.cli.main import app
from planner.plan.file import load_plan

pytestmark = pytest.mark.usefixtures("searched_once")

TINY = ("--model", "llama-tiny", "--hardware", "cpu", "--global-batch", "8")
EMBEDDING, ON_SERVERS = "model.embed_tokens.*=host", "model.embed_tokens.*=servers"
BUCKETS = ("--buckets", "4MiB")  # the same, whatever would be best
PLANS: dict[str, tuple[str, ...]] = {
    "data": ("--devices", "4", "--data", "4", "--zero", "0", "--micro-batches", "1", *BUCKETS),
    "zero": ("--devices", "4", "--data", "4", "--zero", "3", "--micro-batches", "2", "--recompute", "full"),
    "tensor": ("--devices", "4", "--tensor", "4", "--micro-batches", "1"),
    "both": ("--devices", "4", "--data", "2", "--tensor", "2", "--micro-batches", "2"),
    "pipeline": ("--devices", "4", "--pipeline", "2", "--tensor", "2", "--micro-batches", "8", "--schedule", "1f1b"),
    "host": ("--devices", "4", "--data", "4", "--zero", "0", "--micro-batches", "1", "--place", EMBEDDING, *BUCKETS),
    "servers": ("--devices", "4", "--pipeline", "2", "--tensor", "2", "--micro-batches", "8", "--place", ON_SERVERS),
    "short": ("--devices", "4", "--data", "4", "--zero", "0", "--micro-batches", "1", "--seq-len", "64"),
}
MORE = (
    ("data", "tensor"),
    ("tensor", "zero"),
    ("pipeline", "data"),
    ("zero", "pipeline"),
    ("pipeline", "both"),
    ("servers", "data"),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, traced_once: None) -> Path:
    """A folder of those plans that are asked for."""
    return tmp_path_factory.mktemp("plans")


def file_of(folder: Path, name: str) -> str:
    """The file of a plan; made by the first who asks for it."""
    path = folder / f"{name}.json"
    if not path.exists():
        made = CliRunner().invoke(app, [*TINY, *PLANS[name], "-q", "-o", str(path)])
        assert made.exit_code == 0, made.stderr
    return str(path)


def diff(folder: Path, first: str, second: str, *options: str) -> str:
    result = CliRunner().invoke(app, ["diff", file_of(folder, first), file_of(folder, second), *options])
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return str(result.stdout)


def content(folder: Path, first: str, second: str) -> dict[str, Any]:
    found = json.loads(diff(folder, first, second, "--json"))
    assert isinstance(found, dict)
    return found


def names(found: dict[str, Any]) -> list[list[str]]:
    return [[one["name"] for one in step["differences"]] for step in found["steps"]]


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("data", "zero"),
        ("both", "pipeline"),
        ("both", "servers"),
        *(pytest.param(*two, marks=pytest.mark.thorough) for two in MORE),
    ],
)
def test_the_steps_lead_from_one_plan_to_the_other(files: Path, first: str, second: str) -> None:
    """Each begins with what the one before it ended with; the ends are the predictions of the files, to the digit."""
    found = content(files, first, second)
    steps = found["steps"]
    ends = [load_plan(files / f"{name}.json").prediction for name in (first, second)]
    for kind in ("step_seconds", "peak_bytes"):
        assert steps[0][f"{kind}_before"] == getattr(ends[0], kind)
        assert steps[-1][f"{kind}_after"] == getattr(ends[1], kind)
        for before, after in itertools.pairwise(steps):
            assert before[f"{kind}_after"] == after[f"{kind}_before"]
    assert found["difference_seconds"] == ends[1].step_seconds - ends[0].step_seconds
    assert found["difference_bytes"] == ends[1].peak_bytes - ends[0].peak_bytes
    for step in steps:
        assert step["difference_seconds"] == step["step_seconds_after"] - step["step_seconds_before"]


@pytest.mark.thorough
def test_what_costs_nothing_alone_is_told_apart(files: Path) -> None:
    """ZeRO 3 and full recomputation save memory each; every difference is one step."""
    found = content(files, "data", "zero")
    by_name = {step["differences"][0]["name"]: step for step in found["steps"]}
    assert all(len(step["differences"]) == 1 for step in found["steps"])
    assert {"micro-batches", "recomputation", "stored layouts of mlp", "stored layouts of self_attn"} <= by_name.keys()
    assert by_name["recomputation"]["differences"][0]["first"] == "none"
    assert by_name["recomputation"]["difference_seconds"] > 0
    assert by_name["recomputation"]["difference_bytes"] < 0
    items = by_name["stored layouts of mlp"]["differences"][0]["items"]
    assert [item["name"] for item in items] == [
        f"model.layers.*.mlp.{name}_proj.weight" for name in ("gate", "up", "down")
    ]


@pytest.mark.slow
@pytest.mark.thorough
def test_strategies_are_told_part_by_part(files: Path) -> None:
    found = names(content(files, "data", "tensor"))
    assert ["strategies of self_attn"] in found
    assert ["strategies of mlp"] in found
    assert ["degrees"] not in found


@pytest.mark.thorough
def test_degrees_on_other_axes_change_every_strategy_at_once(files: Path) -> None:
    found = content(files, "both", "pipeline")
    (degrees,) = [one for step in found["steps"] for one in step["differences"] if one["name"] == "degrees"]
    assert (degrees["first"], degrees["second"]) == ("data 2 x tensor 2, mesh 2x2", "tensor 2 x pipeline 2, mesh 2")
    assert not any("strategies" in name for step in names(found) for name in step)


@pytest.mark.parametrize(("first", "second"), [("data", "host"), ("host", "data")])
def test_tables_that_move_are_a_difference_of_their_own(files: Path, first: str, second: str) -> None:
    found = content(files, first, second)
    (tables,) = [step for step in found["steps"] if [one["name"] for one in step["differences"]] == ["tables"]]
    where = {"data": "on the devices", "host": "model.embed_tokens.* on the host"}
    assert (tables["differences"][0]["first"], tables["differences"][0]["second"]) == (where[first], where[second])
    assert tables["difference_seconds"] != 0
    assert all(step["differences"][0]["name"] != "gradients" for step in found["steps"])


@pytest.mark.thorough
def test_another_length_is_another_model(files: Path) -> None:
    found = content(files, "data", "short")
    assert names(found)[0] == ["model"]
    assert found["steps"][0]["differences"][0]["second"] == "llama-tiny, 64 tokens, fp32"


def test_equal_plans_differ_in_nothing(files: Path) -> None:
    found = content(files, "data", "data")
    assert (found["steps"], found["difference_seconds"]) == ([], 0)
    assert "decide the same" in diff(files, "data", "data")


def test_the_report_names_both_and_sums_up(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    report = diff(Path(), "data", "zero")
    for words in ("data.json", "zero.json", "recomputation", "none", "full", "stored layouts of mlp", "all"):
        assert words in report


def test_models_of_other_operators_are_compared_as_a_whole(files: Path) -> None:
    made = CliRunner().invoke(
        app, ["--model", "gpt-tiny", *TINY[2:], *PLANS["data"], "-q", "-o", str(files / "gpt.json")]
    )
    assert made.exit_code == 0, made.stderr
    found = content(files, "data", "gpt")
    assert len(found["steps"]) == 1
    assert "model" in names(found)[0]
