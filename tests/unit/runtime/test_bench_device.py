"""The benchmark of one accelerator, on a CPU."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_device", ROOT / "tests" / "benchmarks" / "bench_device.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.thorough
def test_it_measures_what_was_predicted_and_plain_pytorch(tmp_path: Path) -> None:
    bench = benchmark()
    case = bench.ON_PROCESSORS[0]
    found = bench.measured(case, tmp_path, ROOT / "hardware_profiles" / "cpu.toml")
    assert found["agrees"] is True
    assert found["seconds"] > 0
    assert "%" in bench.columns(found)
    assert bench.by_hand(case)["seconds"] > 0


@pytest.mark.slow
@pytest.mark.thorough
def test_what_cannot_be_planned_says_why(tmp_path: Path) -> None:
    bench = benchmark()
    found = bench.measured(bench.ON_PROCESSORS[0], tmp_path, tmp_path / "missing.toml")
    assert isinstance(found, str)
    assert "missing.toml" in found
    assert bench.ratio(found, 1.0).strip() == "-"
