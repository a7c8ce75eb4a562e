"""`plan calibrate` and `plan fit`: what is refused, and one run from measuring to a plan."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import planner
from hardware_profiles import dump_measurements, load_measurements, load_profile
from planner.cli.main import app
from tests.unit.costmodels.test_fit_machine import made_up_measurements


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        ("no JSON", "not valid JSON at line 1"),
        (json.dumps({"schema_version": 1}), "date: the key is missing"),
    ],
)
def test_a_bad_file_is_one_line_and_exit_code_2(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "times.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    result = CliRunner().invoke(app, ["fit", str(path), "-o", str(tmp_path / "out.toml")])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"plan: {path}: {message}")
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out.toml").exists()


def test_of_several_files_the_one_that_is_no_run_is_named(tmp_path: Path) -> None:
    for name in ("one.json", "other.json"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    (tmp_path / "one.json").write_text(json.dumps({"kind": "measured run"}), encoding="utf-8")
    files = [str(tmp_path / name) for name in ("one.json", "other.json")]
    result = CliRunner().invoke(app, ["fit", *files, "-o", str(tmp_path / "out.toml")])
    assert (result.exit_code, result.stderr.startswith(f"plan: {files[1]}: not a measured run")) == (2, True)


@pytest.mark.parametrize("command", [["calibrate"], ["fit", "times.json"]])
def test_a_name_that_no_profile_may_have_is_refused_before_any_work(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "-o", "machine.yaml"])
    assert result.exit_code == 2
    assert "must end in .toml" in result.stderr


def test_python_and_the_command_fit_the_same_profile(tmp_path: Path) -> None:
    times = tmp_path / "times.json"
    times.write_text(dump_measurements(made_up_measurements()), encoding="utf-8")
    result = CliRunner().invoke(app, ["fit", str(times), "-o", str(tmp_path / "machine.toml")])
    assert result.exit_code == 0, result.output
    fitted = planner.calibrate(tmp_path / "again.toml", times=times)
    assert fitted.path.read_text() == (tmp_path / "machine.toml").read_text()
    assert (fitted.measurements, fitted.name) == (times, load_profile(fitted.path).name)
    assert {"part", "rows", "mean_absolute"} == set(fitted.to_rows()[0])
    assert "<table>" in fitted._repr_html_()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_from_measuring_to_a_profile(tmp_path: Path) -> None:
    from runtime.profiling.measuring import measure

    times, profile, lines = tmp_path / "times.json", tmp_path / "machine.toml", []
    assert measure(times, 2, effort="least", on_line=lines.append) == 0
    measurements = load_measurements(times)
    assert measurements.machine.processes == 2
    assert {row.kind for row in measurements.collectives} >= {"all_reduce", "all_to_all", "send_recv"}
    count = len(measurements.kernels) + len(measurements.collectives) + len(measurements.overlaps)
    assert lines[-1] == f"{count} {count} written"
    result = CliRunner().invoke(app, ["fit", str(times), "-o", str(profile)])
    assert result.exit_code == 0, result.output
    assert "mean error" in result.stdout
    cluster = load_profile(profile).with_devices(2)
    assert {fact.kind for fact in cluster.facts} == {"measured", "fitted"}
    assert all(measurements.date in fact.source for fact in cluster.facts)
