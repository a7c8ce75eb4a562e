"""`plan profiles`: the list, one profile, and how well it fits."""

import json
from pathlib import Path
from typing import Any

import pytest

from hardware_profiles import FitError, RunError, profile_names, recorded, software_facts, software_names
from tests.unit.validation.runs import row, write

ROOT = Path(__file__).resolve().parents[3]


def test_the_list(plan: Any) -> None:
    shown = plan("profiles").out
    assert all(name in shown for name in profile_names())
    content = plan.json("profiles")
    assert content["schema_version"] == 1
    assert [one["profile"] for one in content["profiles"]] == list(profile_names())
    h100 = next(one for one in content["profiles"] if one["profile"] == "h100-80gb")
    assert h100["levels"][0] == {"name": "node", "fan_out": 8, "bytes_per_second": 450e9}


def test_one_profile_with_its_sources(plan: Any) -> None:
    content = plan.json("profiles", "h100-80gb")
    facts = {fact["key"]: fact for fact in content["facts"]}
    assert facts["device.peak_tflops.bf16"]["value"] == 989.4
    assert "device.peak_tflops.bf16" in plan("profiles", "h100-80gb").out


def test_the_fit(plan: Any) -> None:
    content = plan.json("profiles", "a100-80gb", "--fit")
    parameter = next(one for one in content["parameters"] if one["part"] == "matmul bf16" and one["name"] == "fill")
    assert (parameter["unit"], parameter["kind"], parameter["value"] > 0) == ("steps of k", "fitted", True)
    told = [one for one in recorded(FitError) if one.profile == "a100-80gb"]
    assert [one["part"] for one in content["fit_errors"]] == [one.part for one in told]
    runs = next(one for one in recorded(RunError) if one.profile == "a100-80gb")
    assert content["run_errors"]["mean_absolute"] == runs.mean_absolute
    shown = plan("profiles", "a100-80gb", "--fit").out
    for words in (
        "Fitted numbers",
        "matmul bf16",
        "µs",
        "collectives in a node",
        "median tau",
        f"{runs.rows} published",
    ):
        assert words in shown


def test_a_machine_without_tables_says_so(plan: Any, here: Path) -> None:
    content = plan.json("profiles", "l4-24gb", "--fit")
    assert (content["fit_errors"], content["run_errors"]) == ([], None)
    shown = plan("profiles", "l4-24gb", "--fit").out
    assert "No times of this machine" in shown
    assert "No training run on this machine" in shown


def test_what_is_recorded_is_not_of_a_file_with_the_same_name(plan: Any, here: Path) -> None:
    import hardware_profiles

    text = (Path(hardware_profiles.__file__).parent / "a100-80gb.toml").read_text()
    (here / "mine.toml").write_text(text.replace("value = 2039", "value = 1555"))
    content = plan.json("profiles", "mine.toml", "--fit")
    assert (content["fit_errors"], content["run_errors"]) == ([], None)


def test_bad_requests(plan: Any) -> None:
    assert "--fit of which profile?" in plan.refused("profiles", "--fit")
    assert "no hardware profile 'abacus'" in plan.refused("profiles", "abacus", "--fit")
    assert json.loads(plan("profiles", "abacus", "--fit", "--json").out)["error"]["kind"] == "bad input"


@pytest.mark.slow
@pytest.mark.thorough
def test_errors_on_runs_are_recorded(plan: Any, here: Path) -> None:
    runs = write(
        here / "runs.csv",
        row(id="first"),
        row(id="second", tp="4", dp="1"),
        row(id="third", profile="h100-80gb", device="H100", peak_mem_GB=""),
        row(id="elsewhere", profile="abacus"),
    )
    assert plan("validate", str(runs), "--record", "errors.csv").code == 0
    a100, h100 = recorded(RunError, here / "errors.csv")
    whole = plan.json("validate", str(runs), "--where", "profile=a100-80gb")["summary"]["whole"]
    assert (a100.profile, a100.rows, a100.timed, a100.with_memory, a100.runs) == ("a100-80gb", 2, 2, 2, "runs.csv")
    assert a100.mean_absolute == pytest.approx(whole["seconds"]["mean_absolute"], abs=1e-4)
    assert (h100.profile, h100.with_memory, h100.memory_bias, h100.median_tau) == ("h100-80gb", 0, None, None)

    write(
        runs, row(id="third", profile="h100-80gb", device="H100"), row(id="again", profile="h100-80gb", device="H100")
    )
    assert plan("validate", str(runs), "--record", "errors.csv").code == 0
    assert [(one.profile, one.rows) for one in recorded(RunError, here / "errors.csv")] == [
        ("a100-80gb", 2),
        ("h100-80gb", 2),
    ]


@pytest.mark.parametrize("part", [("--limit", "1"), ("--where", "tier=A")])
def test_a_part_of_the_rows_is_not_recorded(plan: Any, here: Path, part: tuple[str, str]) -> None:
    runs = write(here / "runs.csv", row())
    assert "--record is for all rows of a profile" in plan.refused("validate", str(runs), *part, "--record", "e.csv")
    assert not (here / "e.csv").exists()


def test_a_table_that_is_none_is_refused_before_anything_is_evaluated(plan: Any, here: Path) -> None:
    runs = write(here / "runs.csv", row())
    assert "runs.csv: line 1: the columns must be" in plan.refused("validate", str(runs), "--record", str(runs))


@pytest.mark.parametrize("stack", software_names())
def test_what_a_stack_was_fitted_to_is_in_the_repository(stack: str) -> None:
    words = [word for fact in software_facts(stack) for word in fact.source.replace(",", " ").split()]
    assert all((ROOT / word).is_file() for word in words if word.startswith("tests/"))
    assert "tests/benchmarks/data/training_runs.csv" not in words  # which says nothing of software


def test_a_profile_says_how_far_off_runs_on_it_are(plan: Any) -> None:
    assert "of the step time of" in plan("profiles", "a100-80gb").out
    assert "No step of a training run on it" in plan("profiles", "v100-32gb").out


def test_stacks_are_listed_and_shown_with_sources(plan: Any) -> None:
    listed = plan("stacks").out
    assert all(name in listed for name in ("pytorch", "fsdp-compiled", "megatron-2021", "deepspeed"))
    content = plan.json("stacks", "megatron-2021")
    assert (content["attention"], content["whole_blocks"], content["schema_version"]) == ("unfused", True, 1)
    assert {fact["kind"] for fact in content["facts"]} <= {"datasheet", "measured", "fitted", "assumed"}
    assert all(fact["source"] for fact in content["facts"])
    assert len(plan.json("stacks")["stacks"]) >= 8
    refused = plan("stacks", "megatrn")
    assert refused.code == 2
    assert "did you mean megatron" in refused.err
