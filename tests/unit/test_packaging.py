"""What a wheel would hold, asked of setuptools itself without building one."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from setuptools import Distribution
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = ("costmodels", "hardware_profiles", "planner", "runtime")


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Paths, relative to the repository, of all files that setuptools would copy into a wheel."""
    monkeypatch.chdir(ROOT)
    distribution = Distribution({"script_name": "setup.py"})
    distribution.parse_config_files(["pyproject.toml"])
    command = build_py(distribution)
    command.ensure_finalized()
    return {Path(source).as_posix() for source in command.get_output_mapping().values()}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_file_of_a_package_is_shipped(package: str, shipped: set[str]) -> None:
    present = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    if f"{package}/__init__.py" not in present:
        pytest.skip(f"{package}/__init__.py is not written yet")
    assert present - shipped == set(), "a folder lacks __init__.py, or [tool.setuptools.package-data] a pattern"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_tells_type_checkers_that_it_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_nothing_else_is_shipped(shipped: set[str]) -> None:
    assert {path.partition("/")[0] for path in shipped} <= set(PACKAGES)


@pytest.mark.skipif(not (ROOT / "planner/cli/main.py").exists(), reason="planner/cli/main.py is not written yet")
def test_the_command_leads_to_a_function() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    command = EntryPoint(name="plan", value=project["scripts"]["plan"], group="console_scripts")
    assert callable(command.load())
