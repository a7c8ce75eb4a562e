"""What `--json` prints has the form that docs/json-schema.json states, command by command."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hardware_profiles.run_record import MeasuredRun, RankTerms, RunMachine, dump_run_record
from planner.cli.main import app
from planner.cli.schemas import ANSWERS, json_schema
from planner.cli.schemas.errors import Refused
from planner.plan.compare.measured import run_plan
from planner.plan.file import load_plan
from planner.plan.plan import Plan
from runtime.processes.progress import NoticeReport, RestartReport, RunSummary, StepReport, content_of
from runtime.processes.stragglers import SlowRank
from tests.unit.runtime.checkpoint_states import write_model
from tests.unit.validation.runs import row, write

pytestmark = pytest.mark.usefixtures("searched_once")

PATH = Path(__file__).parents[3] / "docs" / "json-schema.json"
TINY = ("--model", "llama-tiny", "--hardware", "cpu", "--devices", "2", "--global-batch", "8", "--pipeline", "1")
TO_MEGATRON = ("--to", "megatron", "--approximate")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, traced_once: None) -> Path:
    """A folder with two plans, one of them exported, measured runs, and a model."""
    folder = tmp_path_factory.mktemp("answers")
    write(folder / "runs.csv", row(id="first"), row(id="elsewhere", profile="abacus"))
    for name, options in (("a.json", ()), ("b.json", ("--tensor", "2"))):
        made = CliRunner().invoke(app, [*TINY, *options, "-q", "-o", str(folder / name)])
        assert made.exit_code == 0, made.stderr
    (folder / "a.run.json").write_text(dump_run_record(record_of(load_plan(folder / "a.json"))), encoding="utf-8")
    line = (
        "global_batch_size: 8 | max_memory_allocated: 1073741824 | train_step_timing in s: 0.2 | TFLOPS_per_GPU: 1e-2"
    )
    (folder / "train.log").write_text(f"{line}\n", encoding="utf-8")
    write_model(folder / "merged", "llama-tiny")
    for words in (
        ("export", str(folder / "b.json"), *TO_MEGATRON, "-o", str(folder / "megatron")),
        ("checkpoint", "merge", str(folder / "merged"), "-o", str(folder / "moved/step-000001")),
    ):
        done = CliRunner().invoke(app, [*words])
        assert done.exit_code == 0, done.stderr
    return folder


def record_of(plan: Plan) -> MeasuredRun:
    """A run in which all took twice what was predicted."""
    known = run_plan(plan)
    rank = RankTerms(
        stage=0,
        seconds={name: 2 * seconds for name, seconds in known.predicted.items()},
        cpu_seconds={"forward": 0.1},
        peak_bytes=5e8,
        memory={"weights": 1e7},
    )
    return MeasuredRun(
        kind="measured run",
        schema_version=2,
        date="2026-01-01",
        plan=known,
        machine=RunMachine(name="a processor", device_type="cpu", torch="2.9", threads=1),
        step_seconds=(0.3,),
        profiled_seconds=0.4,
        ranks=(rank,) * plan.cluster.devices,
        operators={"matmul": 0.1},
        collectives=(),
        peak_kind="resident",
    )


TINY_COST = ("--model", "llama-tiny", "--tokens", "1B", "--price", "0.1")

CALLS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("plan", (*TINY, "--top", "2", "--explain", "--context-by", "auto", "-o", "c.json")),
    ("plan estimate", ("estimate", *TINY, "--tensor", "2", "--certify")),
    ("plan estimate PLAN", ("estimate", "a.json")),
    ("plan manual", ("manual", "a.json")),
    ("plan compare", ("compare", "a.json", "a.run.json", "--clock", "cpu")),
    ("plan compare", ("compare", "a.json", "--log", "train.log", "--from", "nemo")),
    ("plan compare --model", ("compare", *TINY_COST, "--hardware", "cpu", "--devices", "1,2")),
    ("plan capacity", ("capacity", *TINY_COST, "--hardware", "h100", "--days", "1")),
    ("plan compare ENGINES", ("compare", "a.json", "--engines", "deepspeed,torch")),
    ("plan", (*TINY, "--for", "torch", "-o", "torch.json")),
    ("plan fit RUN", ("fit", "a.run.json", "-o", "mine.toml")),
    ("plan replan", ("replan", "b.json", "--hardware", "cpu")),
    ("plan advise", ("advise", "megatron", "--model", "llama-tiny", "--hardware", "cpu", "--time-limit", "5")),
    ("plan diff", ("diff", "a.json", "b.json")),
    ("plan explain PLAN", ("explain", "a.json", "--no-search")),
    ("plan explain PLAN NAME", ("explain", "a.json", "*.mlp.up_proj")),
    ("plan show", ("show", "a.json")),
    ("plan show --rank", ("show", "a.json", "--rank", "1")),
    ("plan verify", ("verify", "a.json")),
    ("plan audit", ("audit", "a.json")),
    ("plan prove", ("prove", "a.json")),
    ("plan validate", ("validate", "runs.csv", "--processes", "1")),
    ("plan export", ("export", "b.json", *TO_MEGATRON, "-o", "again")),
    ("plan export OPERATORS", ("export", "b.json", "--to", "mindspore", "-o", "strategies")),
    ("plan import", ("import", "megatron", "--from", "megatron", "--model", "llama-tiny", "--hardware", "cpu")),
    ("plan report", ("report", "a.json", "--no-search")),
    ("plan models", ("models",)),
    ("plan models NAME", ("models", "vit-l16")),
    ("plan profiles", ("profiles",)),
    ("plan profiles NAME", ("profiles", "h100-80gb")),
    ("plan profiles NAME --fit", ("profiles", "h100-80gb", "--fit")),
    ("plan stacks", ("stacks",)),
    ("plan stacks NAME", ("stacks", "nemo")),
    ("plan checkpoint convert", ("checkpoint", "convert", "merged", "--plan", "b.json", "-o", "sliced")),
    ("plan checkpoint merge", ("checkpoint", "merge", "merged", "-o", "merged again")),
    ("plan checkpoint adopt", ("checkpoint", "adopt", "moved")),
    ("plan checkpoint inspect", ("checkpoint", "inspect", "merged")),
    ("plan checkpoint verify", ("checkpoint", "verify", "merged")),
    ("error", ("shwo",)),
    ("error", ("checkpoint", "inspect", "a.json")),
    ("error", (*TINY, "--memory-limit", "1MiB")),
)


@pytest.mark.cases(4, 2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [pytest.param(*call, marks=pytest.mark.thorough) if call[0] == "plan prove" else call for call in CALLS],
    ids=[name for name, _ in CALLS],
)
def test_an_answer_has_its_form(name: str, arguments: tuple[str, ...], files: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(files)
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert (result.exit_code == 0) == (name != "error"), result.output
    ANSWERS[name].model_validate_json(result.stdout)


def test_what_a_run_reports_has_its_form() -> None:
    step = StepReport(step=1, steps=2, loss=math.nan, unsharded=None, seconds=0.5, samples=8, tokens=None)
    summary = RunSummary(
        steps=2,
        data="synthetic",
        seconds=None,
        samples=8,
        tokens=None,
        predicted_seconds=0.5,
        low_seconds=None,
        high_seconds=None,
        profile="cpu",
        elsewhere="",
        peak_bytes=(1.0, 2.0),
        peak_kind="resident",
        predicted_peak_bytes=2.0,
        precision="fp32",
        difference=math.inf,
        tolerance=1e-4,
        busy_seconds=(0.1, 0.3),
        slow=(SlowRank(rank=1, seconds=0.3, times=3.0),),
    )
    restart = RestartReport(restart=1, step=2, devices=4, reason="rank 1 was killed by SIGKILL")
    for report, kind, field in (
        (step, "step", "seconds"),
        (summary, "summary", "seconds"),
        (restart, "restart", "step"),
        (NoticeReport(text="'four' is no number of devices"), "notice", "text"),
    ):
        content = content_of(report)
        ANSWERS["plan run"].model_validate_json(json.dumps(content))
        assert content["event"] == kind
        with pytest.raises(ValueError, match=field):
            ANSWERS["plan run"].model_validate_json(json.dumps({**content, field: ["soon"]}))


def test_files_that_are_not_whole_are_told(files: Path, tmp_path: Path) -> None:
    whole = CliRunner().invoke(app, ["checkpoint", "inspect", str(files / "merged")])
    assert "all files are there and as long as they were written" in whole.stdout
    shutil.copytree(files / "merged", tmp_path / "cut")
    (saved,) = (tmp_path / "cut").glob("*.safetensors")
    with saved.open("r+b") as file:
        file.truncate(saved.stat().st_size - 1)
    told = CliRunner().invoke(app, ["checkpoint", "inspect", str(tmp_path / "cut")])
    assert (told.exit_code, f"damaged: {saved}: is truncated" in told.stdout) == (0, True), told.output
    saved.unlink()
    content = json.loads(CliRunner().invoke(app, ["checkpoint", "inspect", str(tmp_path / "cut"), "--json"]).stdout)
    assert "is missing" in content["files"][0]["fault"]


def test_every_command_has_a_form() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    forms = {name.split()[1] for name in ANSWERS if " " in name}
    single = {name: command for name, command in commands.items() if not hasattr(command, "commands")}
    with_json = {name for name, command in single.items() if _has_json(command)}
    assert with_json == set(single) - {"help", "ui"}
    assert forms == set(commands) - {"help", "ui"}
    for name in set(commands) - set(single):
        inner = commands[name].commands
        assert {word for word, command in inner.items() if _has_json(command)} == set(inner)
        assert {f"plan {name} {word}" for word in inner} <= set(ANSWERS)


def _has_json(command: Any) -> bool:
    return any("--json" in p.opts for p in command.params)


def test_the_document_is_what_the_command_writes() -> None:
    command = "python -m planner.cli.schemas docs/json-schema.json"
    assert PATH.read_text(encoding="utf-8") == json_schema(), f"docs/json-schema.json is out of date; run {command}"
    with pytest.raises(ValueError, match="schema_version"):
        Refused.model_validate({"error": {"kind": "bad input", "message": ""}})


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (("plan", "exp"), {"explain", "export"}),
        (("plan", "--model", "llama-t"), {"llama-tiny"}),
        (("plan", "estimate", "--hardware", "h20"), {"h20-141gb", "h20-96gb", "h200-141gb"}),
        (("plan", "--schedule", "zb"), {"zb_h1", "zb_v"}),
        (("plan", "--mode", "stand"), {"stand_alone"}),
    ],
)
def test_shells_complete_commands_and_names(typed: tuple[str, ...], words: set[str]) -> None:
    environment = {
        "_PLAN_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(typed),
        "COMP_CWORD": str(len(typed) - 1),
    }
    result = CliRunner().invoke(app, [], env=environment)
    assert (result.exit_code, set(result.stdout.split())) == (0, words), result.output
