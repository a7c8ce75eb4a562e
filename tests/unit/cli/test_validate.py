"""`plan validate` on a small file: every row is there, whatever became of it."""

import json
import time
from multiprocessing import active_children
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.cli.main import app
from planner.errors import RequestError
from planner.models.dimensions import Dimensions, ExpertDimensions, Family
from planner.validation.pricing.evaluate import evaluate_rows
from planner.validation.pricing.priced_run import traced
from planner.validation.reading.row_files import read_rows
from tests.refusals import refused
from tests.unit.validation.runs import endless, killed, row, write

pytestmark = pytest.mark.usefixtures("searched_once")

HUGE = {
    "n_layers": "4",
    "hidden": "16384",
    "ffn_hidden": "65536",
    "head_dim": "1024",
    "n_devices": "1",
    "n_params_B": "",
    "iter_time_s": "10",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(
        tmp_path_factory.mktemp("validate") / "runs.csv",
        row(id="first"),
        row(id="second", tp="4", dp="1", recompute=""),
        row(id="state-space", arch="ssm", rank_group=""),
        row(id="impossible", **HUGE, tp="1", pp="1", dp="1", rank_group="other"),
        row(id="elsewhere", profile="abacus", rank_group="other"),
    )


@pytest.mark.thorough
def test_json(runs: Path) -> None:
    done = CliRunner().invoke(app, ["validate", str(runs), "--json"])
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    assert content["schema_version"] == 1
    first, second, other, impossible, elsewhere = content["rows"]
    assert list(first) == [
        "id",
        "line",
        "source",
        "profile",
        "rank_group",
        "tier",
        "flag",
        "measured_seconds",
        "predicted_seconds",
        "low_seconds",
        "high_seconds",
        "measured_peak_bytes",
        "predicted_peak_bytes",
        "low_peak_bytes",
        "high_peak_bytes",
        "peak_kind",
        "needed_bytes",
        "capacity_bytes",
        "time_seconds",
        "feasible",
        "notes",
        "error",
    ]
    assert first["predicted_seconds"] > 0
    assert (first["measured_seconds"], first["measured_peak_bytes"], first["flag"]) == (0.1, 4e9, None)
    assert (first["feasible"], first["error"]) == (True, None)
    assert first["low_seconds"] < first["predicted_seconds"] < first["high_seconds"]
    assert first["notes"][0] == "taken for megatron, attention best"
    assert first["notes"][1].startswith("peak unknown to be allocated, reserved or used")
    assert sum(first["time_seconds"].values()) == pytest.approx(first["predicted_seconds"])
    assert first["low_peak_bytes"] < first["predicted_peak_bytes"] < first["high_peak_bytes"]
    assert first["needed_bytes"] < first["capacity_bytes"]
    assert second["notes"] == ["recomputation unknown: none", *first["notes"]]
    assert "the architecture is ssm" in other["error"]
    assert (other["predicted_seconds"], other["feasible"]) == (None, None)
    assert impossible["feasible"] is False
    assert impossible["predicted_seconds"] > 0
    assert impossible["predicted_peak_bytes"] > 80 * 2**30
    assert "abacus" in elsewhere["error"]
    summary = content["summary"]
    assert (summary["whole"]["rows"], summary["whole"]["evaluated"], summary["whole"]["feasible"]) == (5, 3, 2)
    assert [part["name"] for part in summary["rank_groups"]] == ["one", "other"]
    assert (summary["whole"]["ran"]["judged"], summary["whole"]["ran"]["count"]) == (2, 1)
    lacking = impossible["needed_bytes"] / impossible["capacity_bytes"] - 1
    assert summary["whole"]["ran"]["worst"] == pytest.approx(lacking)


def test_what_people_read(runs: Path) -> None:
    done = CliRunner().invoke(app, ["validate", str(runs)])
    assert done.exit_code == 0
    for name in ("first", "second", "state-space", "impossible", "elsewhere"):
        assert f"\n{name} " in done.stdout
    assert "not evaluated: the architecture is ssm" in done.stdout
    assert "3 of 5 rows evaluated" in done.stdout


def test_rows_can_be_chosen(runs: Path) -> None:
    chosen = ["--where", "rank_group=other", "--where", "profile=abacus", "--json"]
    content = json.loads(CliRunner().invoke(app, ["validate", str(runs), *chosen]).stdout)
    assert [found["id"] for found in content["rows"]] == ["elsewhere"]
    content = json.loads(CliRunner().invoke(app, ["validate", str(runs), "--limit", "1", "--json"]).stdout)
    assert [found["id"] for found in content["rows"]] == ["first"]


def test_a_record_that_cannot_be_written_is_refused_before_rows_are_evaluated(runs: Path) -> None:
    """The twelve minutes of all published rows ended with the refusal, and showed nothing."""
    done = CliRunner().invoke(app, ["validate", str(runs), "--record", str(runs / "errors.csv")])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "cannot be written" in done.stderr


def test_conditions_that_no_row_meets_are_refused(runs: Path) -> None:
    done = CliRunner().invoke(app, ["validate", str(runs), "--where", "profile=a100", "--json"])
    assert done.exit_code == 2
    assert "profile is a100-80gb, abacus there" in json.loads(done.stdout)["error"]["message"]


@pytest.mark.parametrize("where", ["profile", "=x", "porfile=x"])
def test_a_bad_condition_is_bad_input(runs: Path, where: str) -> None:
    done = CliRunner().invoke(app, ["validate", str(runs), "--where", where])
    assert done.exit_code == 2
    assert "--where" in done.stderr


def test_a_bad_row_is_one_refused_row(tmp_path: Path) -> None:
    path = write(tmp_path / "runs.csv", row(arch="ssm"), row(id="b", pp="two"), row(arch="ssm"))
    done = CliRunner().invoke(app, ["validate", str(path), "--json"])
    assert done.exit_code == 0, done.output
    first, bad, again = json.loads(done.stdout)["rows"]
    assert "the architecture is ssm" in first["error"]
    assert (bad["line"], bad["measured_seconds"]) == (3, None)
    assert "line 3, column pp: 'two' is not a whole number" in bad["error"]
    assert "'gpt' is the name of line 2 too" in again["error"]
    shown = CliRunner().invoke(app, ["validate", str(path)]).stdout
    assert "refused: line 3, column pp" in shown
    assert "0 of 3 rows evaluated" in shown
    assert "2 refused as they cannot be read" in shown


def test_a_strict_reader_ends_at_the_first_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path / "runs.csv", row(arch="ssm"), row(id="b", pp="two", tier="B"))
    done = CliRunner().invoke(app, ["validate", str(path), "--json", "--strict", "--where", "tier=A"])
    assert done.exit_code == 2
    assert "line 3, column pp: 'two' is not a whole number" in json.loads(done.stdout)["error"]["message"]
    assert CliRunner().invoke(app, ["validate", str(tmp_path / "none.csv")]).exit_code == 2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_processes_change_nothing(tmp_path: Path) -> None:
    rows = [
        row(
            id=f"{tensor}-{micro}-{n}",
            tp=str(tensor),
            dp=str(4 // tensor),
            micro_batch=str(micro),
            n_layers=str(n),
            n_params_B="",
        )
        for tensor in (1, 2, 4)
        for micro in (1, 2, 4)
        for n in (2, 4)
    ]
    read = read_rows(write(tmp_path / "runs.csv", *rows))
    assert evaluate_rows(read, 2) == evaluate_rows(read)


@pytest.mark.thorough
@pytest.mark.slow
def test_an_interrupt_ends_processes_at_once(tmp_path: Path) -> None:
    """They went on with the rows that they had, for minutes, and then with the next ones."""

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    rows = read_rows(write(tmp_path / "runs.csv", row(id="a", arch="ssm"), *(row(id=f"b{at}") for at in range(13))))
    others, began = set(active_children()), time.monotonic()  # ranks of other tests
    with pytest.raises(KeyboardInterrupt):
        evaluate_rows(rows, 2, interrupt, endless)
    assert time.monotonic() - began < 120
    assert not set(active_children()) - others


@pytest.mark.thorough
@pytest.mark.slow
def test_a_process_that_is_killed_is_said_to_be(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path / "runs.csv", *(row(id=f"b{at}") for at in range(13))))
    with refused(RequestError, "--processes 1"):
        evaluate_rows(rows, 2, change=killed)


@pytest.mark.parametrize(("family", "tied"), [("gpt", True), ("llama", True), ("llama", False)])
def test_parameters_by_formula_are_those_of_the_graph(family: Family, tied: bool) -> None:
    kv_heads = 4 if family == "gpt" else 2
    model = Dimensions(
        family=family, layers=3, hidden=64, ffn=256, heads=4, kv_heads=kv_heads, vocabulary=512, tied=tied, sequence=32,
        precision="bf16",
    )  # fmt: skip
    assert traced(model).parameter_count() == model.parameters


def test_parameters_of_experts_by_formula_are_those_of_the_graph() -> None:
    experts = ExpertDimensions(count=4, chosen=2, width=48, shared_width=40, dense_layers=1)
    model = Dimensions(
        family="llama", layers=3, hidden=64, ffn=256, heads=4, kv_heads=2, vocabulary=512, tied=False, sequence=32,
        precision="bf16", head_size=24, experts=experts,
    )  # fmt: skip
    assert traced(model).parameter_count() == model.parameters


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("like", ["deepseek-v2-lite", "deepseek-v3"])
def test_parameters_of_latent_attention_by_formula_are_those_of_the_graph(like: str) -> None:
    """With a latent vector for queries, and without."""
    experts = ExpertDimensions(count=16, chosen=8, width=48, shared_width=40, dense_layers=1)
    model = Dimensions(
        family="deepseek", layers=3, hidden=64, ffn=256, heads=4, kv_heads=4, vocabulary=512, tied=False, sequence=32,
        precision="bf16", experts=experts, like=like,
    )  # fmt: skip
    assert traced(model).parameter_count() == model.parameters
