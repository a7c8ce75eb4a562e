"""What is asked of a run: how it travels to the ranks, and what is refused before anything starts."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from planner.cli.commands import run as running
from planner.errors import PlannerError, RequestError
from planner.plan.file import save_plan
from runtime.launch.launch import launch
from runtime.processes.progress import RunSummary, StepReport, content_of, lines_of, record_of, report_of
from runtime.processes.stragglers import SlowRank
from runtime.run_settings import RunSettings, asked_settings, parse_arguments
from tests.distributed import plans
from tests.refusals import refused

OTHER = RunSettings(
    steps=7, seed=3, check=False, model="a.b:c", dataset="d:e", shuffle=True, full_batch=False, workers=2, timeout=1.5,
    on_nonfinite="skip", on_spike="stop", spike_factor=3.0, spike_window=5, rollbacks=2, general=True,
    save="runs/a b", save_every=5, keep=2, resume="c", go_on=True, weights="d", cast=True,
    compile=True, listen="10.0.0.0/24",
)  # fmt: skip
SUMMARY = RunSummary(
    steps=2, data="d:e", seconds=None, samples=4, tokens=None, predicted_seconds=0.5, low_seconds=None,
    high_seconds=None, profile="cpu", elsewhere="", peak_bytes=(2.0**30, 2.0**31), peak_kind="allocated",
    predicted_peak_bytes=2.0**30, precision="fp32", difference=float("inf"), tolerance=1e-4,
)  # fmt: skip
SLOW = replace(SUMMARY, busy_seconds=(0.1, 0.3), slow=(SlowRank(rank=1, seconds=0.3, times=3.0),))
STEP = StepReport(step=1, steps=2, loss=2.5, unsharded=2.0, seconds=0.25, samples=4, tokens=None)


@pytest.mark.parametrize("settings", [RunSettings(), OTHER], ids=["plain", "all"])
def test_settings_reach_the_ranks(settings: RunSettings) -> None:
    assert parse_arguments(["plan.json", *settings.arguments()]).settings == settings


def test_python_m_runtime_takes_every_option_of_plan_run() -> None:
    """Each alone, with a value that is not its default."""
    values = {int: "7", float: "7.5", str: "a b"}
    for one in asked_settings():
        words = [one.flag.off or one.name] if one.kind is bool else [one.name, values[one.kind]]
        found = getattr(parse_arguments(["plan.json", *words]).settings, one.field)
        assert found == (not one.default if one.kind is bool else one.kind(values[one.kind])), one.name
    assert {setting.name for setting in asked_settings()} == {"--" + word for word in offered(running.run)}


def offered(command: Callable[..., None]) -> set[str]:
    """The options of a command but for those of its output."""
    words = {
        word.removeprefix("--").partition("/")[0]
        for parameter in inspect.signature(command).parameters.values()
        for option in parameter.annotation.__metadata__
        for word in (option.default, *(option.param_decls or ()))  # as typer keeps them in Annotated
        if isinstance(word, str) and word.startswith("--")
    }
    return words - {"json"}


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"steps": 0}, ("--steps 0", "--evaluate")),
        ({"steps": -1}, ("--steps -1", 0)),
        ({"steps": 0, "evaluate": "a:b", "measure": "record.json"}, ("--measure", "--steps 0")),
        ({"evaluate_every": 2}, ("--evaluate-every", "--evaluate")),
        ({"timeout": 0.0}, ("--timeout 0", 0)),
        ({"listen": "eth77"}, ("--listen eth77", "lo")),
        ({"workers": 2}, ("--workers", "--dataset package.module:factory")),
        ({"full_batch": False}, ("--own-samples", "--dataset package.module:factory")),
        ({"on_spike": "skp"}, ("--on-spike", "skp", "skip")),
        ({"on_nonfinite": "rollback", "rollbacks": 0}, ("--rollbacks 0", 1)),
        ({"keep": 0}, ("--keep 0", 1)),
        ({"save_every": 0}, ("--save-every 0", 1)),
        ({"keep": 2}, ("--keep 2", "--save DIR")),
        ({"save_every": 2}, ("--save-every 2", "--save DIR")),
        ({"go_on": True}, ("--continue", "--save DIR")),
        ({"save": "a", "go_on": True, "resume": "b"}, ("--resume", "--continue")),
        ({"cast": True}, ("--cast", "--weights PATH")),
        ({"compile": True, "general": True}, ("--compile", "--general")),
        ({"resume": "a", "weights": "b"}, ("--resume", "--weights")),
        ({"spike_factor": 3.0}, ("--spike-factor", "--on-spike")),
        ({"spike_window": 8, "on_nonfinite": "skip"}, ("--spike-window", "--on-spike")),
        ({"rollbacks": 2, "on_spike": "skip"}, ("--rollbacks 2", "rollback")),
        ({"servers": 4}, ("--servers", "--place TABLE=servers")),
        ({"server_folder": "a"}, ("--server-folder", "--place TABLE=servers")),
        ({"steps": 0, "evaluate": "a:b", "on_spike": "stop"}, ("--on-spike", "--steps 0")),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, settings: dict[str, object], facts: tuple[object, ...]) -> None:
    save_plan(plans.hand_plan("zero1", "llama", plans.mesh_of(2)), tmp_path / "plan.json")
    with refused(RequestError, *facts):
        launch(tmp_path / "plan.json", replace(RunSettings(), **settings), lambda report: None)  # type: ignore[arg-type]


def test_a_record_that_could_not_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    """A run of days ended with the refusal, without record and without summary; the plan itself was written over."""
    path = tmp_path / "plan.json"
    save_plan(plans.hand_plan("zero1", "llama", plans.mesh_of(2)), path)
    before = path.read_bytes()
    for measure in (tmp_path, path, path / "run.json"):
        with refused(PlannerError, "--measure" if measure == path else measure):
            launch(path, replace(RunSettings(), measure=str(measure)), lambda report: None)
    assert path.read_bytes() == before


@pytest.mark.parametrize("report", [STEP, SUMMARY, SLOW], ids=["step", "summary", "slow"])
def test_reports_reach_the_parent(report: StepReport | RunSummary) -> None:
    assert report_of(record_of(report)) == report
    assert report_of("step 1 of a model that prints") is None


def test_a_summary_says_where_it_came_from_and_what_it_left() -> None:
    lines = lines_of(replace(SUMMARY, resumed="runs/a/step-000002, step 2", saved="runs/a/step-000004"))
    assert lines[0] == "resumed from runs/a/step-000002, step 2"
    assert "saved: runs/a/step-000004" in lines


def test_a_summary_names_who_is_slow() -> None:
    line = "straggler: rank 1 is busy for 0.3 s of each step, 3.0 times the median of the ranks with the same work"
    assert f"{line}; the others wait for it" in lines_of(SLOW)
    assert not any(line.startswith("straggler") for line in lines_of(SUMMARY))


def test_a_step_as_text_and_for_programs() -> None:
    assert lines_of(STEP) == [
        "step    1   loss 2.500000   unsharded 2.000000   difference 2.5e-01   0.25 s   16 samples/s"
    ]
    assert content_of(STEP)["event"] == "step"
    back = replace(STEP, trouble="the loss is nan", back_to=0)
    assert back.text().endswith("   NO UPDATE: the loss is nan; rolled back to step 0")
    assert replace(STEP, tokens=512).text().endswith("2,048 tokens/s")


def test_a_summary_as_text_and_for_programs() -> None:
    data, seconds, memory, verdict = lines_of(SUMMARY)
    assert data == "data: d:e"
    assert seconds == "step time: not measured, which takes 3 steps or more; predicted 0.5 s by profile cpu"
    assert memory == "peak memory by rank (allocated): 1.00, 2.00 GiB; predicted 1.00 GiB"
    assert verdict.startswith("the plan DIFFERS from the unsharded model: largest relative difference inf")
    assert (content_of(SUMMARY)["difference"], content_of(SUMMARY)["agrees"]) == (None, False)
    measured = replace(SUMMARY, seconds=0.25, tokens=2, low_seconds=0.4, high_seconds=0.6, elsewhere="that is A100")
    assert lines_of(measured)[1] == (
        "step time: 0.25 s (median, without the first 2 steps), 8 tokens/s; predicted 0.5 s"
        " (80% interval 0.4 to 0.6 s) by profile cpu; that is A100"
    )
