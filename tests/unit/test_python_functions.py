"""Functions of the public face that check a plan, plan it again, and read the settings of other engines."""

import contextlib
import inspect
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import planner
from hardware_profiles.run_record import dump_run_record
from planner.api.callers import from_command
from planner.api.jobs import warned
from planner.api.kinds import fits
from planner.api.replanning import machine_by, replanned
from planner.api.speaking import in_python
from planner.cli.main import app
from planner.errors import InfeasibleError, LimitError, ModelError, PlanFileError, RequestError
from tests.refusals import refused
from tests.unit.cli.test_answers import record_of


@pytest.fixture(scope="module")
def plan() -> planner.Plan:
    return planner.search("llama-tiny", "cpu", devices=2, pinned={"tensor": 2, "micro_batches": 1}).plan


DECIDED = {"pipeline": 1, "tensor": 1, "micro_batches": 1}


@pytest.mark.thorough
@pytest.mark.slow
def test_plans_between_the_fastest_and_the_cheapest() -> None:
    model, heard = planner.trace("llama-tiny", precision="fp32"), list[planner.Progress]()
    found = planner.pareto(
        model, "cpu", against="cost", devices=2, global_batch=4, pinned=DECIDED, on_progress=heard.append
    )
    assert [one.plan.cluster.devices for one in found.points] == [2, 1]
    here, there = found.points
    assert here == found.fastest
    assert here.step_seconds < there.step_seconds
    assert here.device_seconds == 2 * here.step_seconds > there.device_seconds == there.step_seconds
    assert heard
    assert not found.stopped
    alone = planner.search(model, "cpu", devices=2, global_batch=4, pinned=DECIDED, simplicity=0)
    assert here.plan.prediction == alone.plan.prediction
    rows = found.to_rows()
    assert (rows[0]["step_seconds"], rows[1]["device_seconds"]) == (here.step_seconds, there.device_seconds)
    assert "<table>" in found._repr_html_()
    assert len(repr(found)) < 200
    assert pickle.loads(pickle.dumps(found)).points[1].plan == there.plan


def test_a_front_says_why_there_is_none() -> None:
    with refused(LimitError, "cancelled"):
        planner.pareto("llama-tiny", "cpu", cancelled=lambda: True)
    with refused(RequestError, "a100-80gb:4,h100-80gb:4", "memory"):
        planner.pareto("llama-tiny", "a100-80gb:4,h100-80gb:4")
    with refused(InfeasibleError, "llama-tiny"):
        planner.pareto("llama-tiny", "cpu", devices=2, pinned=DECIDED, memory_limit=1e6)


def test_notes_stand_at_the_line_of_the_caller() -> None:
    """Of the padded batch here: from `search` and from what calls it."""
    for function in (planner.search, planner.estimate):
        with pytest.warns(UserWarning, match="does not divide the global batch 3") as caught:
            function("llama-tiny", "cpu", devices=2, global_batch=3, pinned={**DECIDED, "data": 2})
        assert {one.filename for one in caught} == {__file__}


class _Strange:
    """Of a type that no parameter has."""


@pytest.mark.parametrize("name", [name for name in planner.__all__ if inspect.isfunction(getattr(planner, name))])
def test_arguments_of_another_type_are_refused_by_name(name: str, plan: planner.Plan) -> None:
    function = getattr(planner, name)
    if not hasattr(function, "__signature__"):
        assert name in ("discover", "load_plan", "save_plan")  # of the parts, which check for themselves
        return
    parameters = inspect.signature(function).parameters
    given = {
        one: next(value for value in ("x", 1, ["x"], plan) if fits(value, kind.annotation))
        for one, kind in parameters.items()
        if kind.default is kind.empty
    }
    for one, kind in parameters.items():
        if kind.annotation is not Any:
            with refused(RequestError, one, "_Strange"):
                function(**{**given, one: _Strange()})


def test_names_that_no_file_has_are_refused() -> None:
    for name, what in (("", "empty"), ("a\0b", "characters"), ("a" * 300, "characters")):
        with refused(RequestError, "plan", what):
            planner.verify(name)
        with refused(RequestError, "folder", what):
            planner.export("plan.json", "megatron", name)
    with refused(RequestError, "args", "leave them out", "not a name"):
        planner.trace("llama-tiny", args=(1,))
    with refused(RequestError, "seq_len", "2,147,483,648"):
        planner.trace("llama-tiny", seq_len=10**30)
    with refused(RequestError, "shard", "q_proj", "1 or more"):
        planner.shard("q_proj", ((0, 1),))


@pytest.mark.parametrize(
    ("command", "python"),
    [
        ("--for megatron: leave out --for", "engine='megatron': leave out engine"),
        ("give it more time (--time-limit)", "give it more time (time_limit)"),
        ("Your own model: --model package.module:factory; or", "Your own model: model='package.module:factory'; or"),
        ("--cluster 'node=8': ...", "cluster='node=8': ..."),
        ("with --tensor 8, or --clip-norm", "with pinned={'tensor': 8}, or update['clip_norm']"),
        ("take --pad batch=4", "take pad={'batch': 4}"),
        ("--no-alltoall, or --alltoall-on node", "alltoall=False, or alltoall='node'"),
        ("its degrees make 8 devices, --devices says 4", "its degrees make 8 devices, devices says 4"),
        ("plan without --precision fp32", "plan without precision='fp32'"),
        ("what plan run PLAN --measure FILE wrote", "what plan run PLAN --measure FILE wrote"),
        ("as plan --model ... -o FILE writes", "as plan --model ... -o FILE writes"),
        ("Megatron's --num-layers", "Megatron's --num-layers"),
        ("take --cluster node=8,cluster=2, or more", "take cluster='node=8,cluster=2', or more"),
        ("as in --schedule 1f1b, --mesh 2x4", "as in pinned={'schedule': '1f1b'}, pinned={'mesh': (2, 4)}"),
        ("(--offload optimizer:disk,weights)", "(pinned={'offload': 'optimizer:disk,weights'})"),
        ("leave --offload out, or", "leave pinned['offload'] out, or"),
        ("--place 'a.b=servers'; --fp8-layers '*' computes", "place={'a.b': 'servers'}; fp8_layers=['*'] computes"),
        ("with --precision bf16 and", "with precision='bf16' and"),
        ("/tmp/--for/config.json: --devices.json", "/tmp/--for/config.json: --devices.json"),
        ("unknown model '--for megatron'; --seq-len 8,192", "unknown model '--for megatron'; seq_len=8192"),
    ],
)
def test_errors_speak_of_parameters(command: str, python: str) -> None:
    assert in_python(command, tuple(inspect.signature(planner.search).parameters)) == python


def test_notes_speak_of_parameters_to_programs_and_of_options_to_commands() -> None:
    for caller, words in ((contextlib.nullcontext(), "seq_len"), (from_command(), "--seq-len")):
        with caller, pytest.warns(UserWarning, match=f"say yours with {words}"):
            warned("config.json gives no length of sequences; say yours with --seq-len")


def test_errors_name_no_option_where_there_is_a_parameter(tmp_path: Path) -> None:
    def names_options(error: Exception) -> list[str]:
        return re.findall("--[a-z-]+", str(error))

    (tmp_path / "run.sh").write_text("echo nothing")
    for wrong in (
        lambda: planner.trace("no-such-model"),
        lambda: planner.search("llama-tiny", "cpu", cluster="node=x"),
        lambda: planner.search("llama-tiny", "cpu", engine="megatrn"),
        lambda: planner.search("llama-tiny", "cpu", pinned={"offload": "everything"}),
        lambda: planner.import_plan(tmp_path / "run.sh"),
        lambda: planner.import_plan(tmp_path / "run.sh", engine="megatrn"),
    ):
        with pytest.raises(planner.PlannerError) as refusal:
            wrong()
        assert names_options(refusal.value) == []


def test_commands_that_use_these_functions_name_options(tmp_path: Path) -> None:
    words = ["compare", "--model", "no-such-model", "--devices", "2", "--hardware", "cpu"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "--model package.module:factory" in result.stderr
    with refused(planner.PlannerError, "model='package.module:factory'"):
        planner.compare("no-such-model", "cpu", devices=2)


def test_a_folder_without_settings_says_what_was_looked_for(tmp_path: Path) -> None:
    with refused(RequestError, tmp_path, "launch.sh", "train.toml"):
        planner.import_plan(tmp_path)


def test_a_plan_is_compared_with_its_run(plan: planner.Plan, tmp_path: Path) -> None:
    record = record_of(plan)
    seconds = sum(record.ranks[0].seconds.values())
    run = tmp_path / "tiny.run.json"
    run.write_text(dump_run_record(replace(record, step_seconds=(seconds,) * 8)), encoding="utf-8")
    found = planner.compare_measured(plan, run)
    assert found.error == pytest.approx(-0.5, abs=0.01)
    assert found.steps == 4
    *parts, step = found.to_rows()
    assert step["measured_seconds"] == pytest.approx(seconds)
    assert sum(float(str(one["predicted_seconds"])) for one in parts) == pytest.approx(step["predicted_seconds"])
    assert [one.name for one in found.classes if one.measured is not None] == ["matmul"]
    assert "<table>" in found._repr_html_()
    for wrong, facts in (
        ({}, ("log", "trace")),
        ({"record": run, "trace": run}, ("trace",)),
        ({"log": run}, ("engine",)),
        ({"trace": run, "clock": "cpu"}, ("clock='cpu'",)),
        ({"record": tmp_path / "none.json"}, (tmp_path / "none.json",)),
        ({"record": run, "clock": "sun"}, ("clock", "sun")),
    ):
        with refused(RequestError, *facts):
            planner.compare_measured(plan, **wrong)  # type: ignore[arg-type]
    with refused(ModelError, "no-such-model"):
        planner.compare_measured(plan, run, model="no-such-model")


def test_a_profile_is_fitted_to_measured_times(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    for path, words, facts in (
        (tmp_path / "mine.txt", {}, (".toml",)),
        (mine, {"nproc": 0}, ("nproc", 0)),
        (mine, {"measurements": mine}, ("overwrite",)),
        (mine, {"times": tmp_path / "t.json", "nproc": 2}, ("times", "nproc")),
        (mine, {"times": tmp_path / "t.json"}, (tmp_path / "t.json",)),
    ):
        with refused(RequestError, *facts):
            planner.calibrate(path, **words)  # type: ignore[arg-type]
    assert not mine.exists()


def test_a_plan_is_verified(plan: planner.Plan) -> None:
    found = planner.verify(plan)
    assert found.holds
    assert found.possible
    assert found.prediction == plan.prediction
    faster = replace(plan, prediction=replace(plan.prediction, step_seconds=plan.prediction.step_seconds / 2))
    edited = planner.verify(faster)
    assert edited.verdict.fits
    assert not edited.holds
    assert "step_seconds" in " ".join(edited.verdict.remarks)
    wrong = replace(plan, cluster=replace(plan.cluster, devices=3))
    with refused(PlanFileError, 3):
        planner.verify(wrong)
    with refused(RequestError, "hardware", "empty"):
        planner.verify(plan, hardware="")


def test_a_proof_needs_a_model_that_can_be_built(plan: planner.Plan) -> None:
    foreign = replace(plan, model=replace(plan.model, reference="package.module:factory"))
    with refused(planner.PlannerError, "package.module:factory", "a proof runs it"):
        planner.prove(foreign)
    with refused(RequestError, "processes", 0):
        planner.prove(plan, processes=0)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_plan_is_proved(plan: planner.Plan) -> None:
    phases: list[str] = []
    proof = planner.prove(plan, on_phase=phases.append)
    assert proof.agrees
    assert proof.complete
    assert phases


def test_a_plan_is_planned_again(plan: planner.Plan) -> None:
    found = planner.replan(plan, "cpu")
    assert found.before == plan
    assert found.kept.plan.prediction == plan.prediction
    assert found.saved_seconds > 0
    assert found.plan.prediction.step_seconds == plan.prediction.step_seconds - found.saved_seconds
    assert ("degrees", "tensor 2", "data 2") in [(one.name, one.here, one.there) for one in found.differences]
    again = planner.replan(found.plan, "cpu")
    assert again.saved_seconds == 0
    assert again.differences == ()
    with refused(RequestError, "cpuu"):
        planner.replan(plan, "cpuu")


def test_levels_are_those_given_or_the_plans_for_a_profile_of_that_name(plan: planner.Plan) -> None:
    composed = replace(plan, cluster=replace(plan.cluster, profile="h100-80gb", composition="node=4@450,cluster@25"))
    assert machine_by(composed, "h100-80gb").composition == "node=4@450,cluster@25"
    assert machine_by(composed, "a100-80gb").composition == ""
    for profile in ("h100-80gb", "h200-141gb"):
        assert machine_by(composed, profile, "node=2,cluster@12").composition == "node=2@450,cluster@12"
    with refused(RequestError, "nod=2,cluster@25", "h100-80gb", "did you mean node?"):
        planner.replan(plan, "h100", cluster="nod=2,cluster@25")


def test_a_plan_that_does_not_fit_does_not_stay(plan: planner.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with its peak above the new machine's memory stayed, as it was the fastest."""
    first = planner.replan(plan, "cpu")
    bound, other = first.kept, first.found.plan.prediction
    machine = machine_by(plan, "cpu")
    monkeypatch.setattr("planner.api.replanning.search", lambda *_: first.found)
    for peak, stays in ((0.9, True), (1.1, False)):
        held = replace(
            bound.plan.prediction,
            step_seconds=other.step_seconds / 2,
            peak_bytes=peak * bound.plan.prediction.capacity_bytes,
        )
        kept = replace(bound, plan=replace(bound.plan, prediction=held))
        found = replanned(plan, kept, bound.graph, 2, machine, lambda _: None, lambda: False)
        assert (found.plan == kept.plan) == stays
        assert ("stays" in repr(found)) == stays
        assert found.saved_seconds == (0 if stays else -other.step_seconds / 2)


@pytest.mark.parametrize("engine", ["torchtitan", "mindspore"])
def test_what_was_exported_is_imported(plan: planner.Plan, engine: str, tmp_path: Path) -> None:
    planner.export(plan, engine, tmp_path / engine, nearest=True)
    found = planner.import_plan(tmp_path / engine, "cpu")
    assert found.fits
    assert found.plan.model.reference == plan.model.reference
    assert found.plan.mesh.sizes == (2,)
    assert found.plan.training.global_batch == plan.training.global_batch


def test_a_plan_that_does_not_fit_is_not_exported_for_operators(plan: planner.Plan, tmp_path: Path) -> None:
    large = replace(plan, prediction=replace(plan.prediction, peak_bytes=plan.prediction.capacity_bytes * 2))
    with refused(InfeasibleError, "mindspore", plan.model.reference, "nothing was written"):
        planner.export(large, "mindspore", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_import_refuses_what_it_does_not_take(plan: planner.Plan, tmp_path: Path) -> None:
    planner.export(plan, "torchtitan", tmp_path / "titan", nearest=True)
    with refused(RequestError, "global_batch", "micro_batches"):
        planner.import_plan(tmp_path / "titan", "cpu", micro_batches=2)
    with refused(RequestError, "devices", 0):
        planner.import_plan(tmp_path / "titan", "cpu", devices=0)


def test_arguments_of_other_types_are_refused(plan: planner.Plan, tmp_path: Path) -> None:
    for wrong in (5, b"cpu"):
        with refused(RequestError, "hardware"):
            planner.verify(plan, hardware=wrong)  # type: ignore[arg-type]
    with refused(RequestError, "hardware", "NoneType"):
        planner.replan(plan, None)  # type: ignore[arg-type]
    with refused(RequestError, "hardware", "NoneType"):
        planner.import_plan(tmp_path, None)  # type: ignore[arg-type]
    for runs in (5, None, iter(["a"])):
        with refused(RequestError, "runs"):
            planner.fit(runs, tmp_path / "mine.toml")  # type: ignore[arg-type]


def test_a_profile_is_corrected_by_a_run(plan: planner.Plan, tmp_path: Path) -> None:
    record = record_of(plan)
    rank, *_ = record.ranks
    seconds = {name: 2 * value for name, value in record.plan.predicted.items()}
    ranks, steps = (replace(rank, seconds=seconds),) * len(record.ranks), (sum(seconds.values()),) * 8
    run = tmp_path / "tiny.run.json"
    run.write_text(dump_run_record(replace(record, ranks=ranks, step_seconds=steps)), encoding="utf-8")
    found = planner.fit([run], tmp_path / "mine.toml")
    assert found.corrected == "cpu"
    compute = next(one for one in found.factors if one.name == "compute")
    assert compute.runs == 1
    assert compute.value == pytest.approx(0.5, rel=0.1)
    slower = planner.replan(plan, str(found.path))
    assert slower.kept.plan.prediction.step_seconds == pytest.approx(2 * plan.prediction.step_seconds, rel=0.2)
    with refused(PlanFileError, "mine.toml", "overwritten"):
        planner.fit([run], tmp_path / "mine.toml", hardware=str(tmp_path / "mine.toml"))
    with refused(RequestError, ".toml"):
        planner.fit([run], tmp_path / "mine")
    with refused(RequestError, "runs", "str"):
        planner.fit(str(run), tmp_path / "mine.toml")
    with refused(RequestError, "runs", "empty"):
        planner.fit([], tmp_path / "mine.toml")
