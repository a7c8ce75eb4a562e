"""The benchmark of one accelerator, on a CPU."""

from pathlib import Path

import pytest

from tests.benchmarks import bench_device as bench

PROFILE = Path(__file__).resolve().parents[3] / "hardware_profiles" / "cpu.toml"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_it_measures_what_was_predicted_and_plain_pytorch(tmp_path: Path) -> None:
    case = bench.ON_PROCESSORS[0]
    found = bench.measured(case, tmp_path, PROFILE)
    assert found["agrees"] is True
    assert found["seconds"] > 0
    assert "%" in bench.columns(found)
    assert bench.by_hand(case)["seconds"] > 0


@pytest.mark.slow
@pytest.mark.thorough
def test_what_cannot_be_planned_says_why(tmp_path: Path) -> None:
    found = bench.measured(bench.ON_PROCESSORS[0], tmp_path, tmp_path / "missing.toml")
    assert isinstance(found, str)
    assert "missing.toml" in found
    assert bench.ratio(found, 1.0).strip() == "-"
