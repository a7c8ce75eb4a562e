"""The notebooks: short, on public names alone, with the outputs of a run from top to bottom; and that they do run."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from nbformat import NotebookNode

from notebooks.execute import NOTEBOOKS, executed
from tests.long_lists import rarely

ROOT = Path(__file__).parents[2]
CELLS = 15  # of a notebook at most
BYTES = 200_000  # of a file at most, pictures included
PACKAGES = ("costmodels", "hardware_profiles", "planner", "runtime")

FIRST = "1"  # by their numbers: run in the thorough list, the others in the exhaustive one
RUN = [case for path in NOTEBOOKS for case in ([path] if path.stem[0] in FIRST else rarely([path]))]

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code_of(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def syntax(notebook: NotebookNode) -> ast.Module:
    """All cells as one module; lines for the shell and for IPython are left out."""
    lines = [line for cell in code_of(notebook) for line in cell.source.splitlines()]
    return ast.parse("\n".join(line for line in lines if not line.startswith(("!", "%"))))


def private_names(tree: ast.Module) -> Iterator[str]:
    """What is used of our packages that no `__all__` lists."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (one.name for one in names if one.name.partition(".")[0] in PACKAGES and "." in one.name)
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] in PACKAGES:
                yield from (f"{module}.{one.name}" for one in names if not listed(module, one.name))
            case ast.Attribute(value=ast.Name(id=package), attr=name) if package in PACKAGES:
                if not name.startswith("__") and not listed(package, name):
                    yield f"{package}.{name}"


def listed(module: str, name: str) -> bool:
    found: ModuleType = importlib.import_module(module)
    return name in getattr(found, "__all__", ())


def test_there_are_eight() -> None:
    assert [path.stem.partition("_")[0] for path in NOTEBOOKS] == list("12345678")


@each
def test_it_is_short_and_small(path: Path) -> None:
    assert len(read(path).cells) <= CELLS
    assert path.stat().st_size <= BYTES


@each
def test_it_uses_public_names_alone(path: Path) -> None:
    assert list(private_names(syntax(read(path)))) == []


@each
def test_its_outputs_are_those_of_one_good_run(path: Path) -> None:
    cells = code_of(read(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "make notebooks"
    outputs = [output for cell in cells for output in cell.outputs]
    assert [output.ename for output in outputs if output.output_type == "error"] == []
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    assert any("image/png" in output.get("data", {}) for output in outputs), "a picture says it quicker"


@each
def test_its_outputs_name_no_folder_of_a_machine(path: Path) -> None:
    outputs = [output for cell in code_of(read(path)) for output in cell.outputs]
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    assert [text for text in texts if re.search(r"(?<!\w)/(home|opt|root|tmp|usr|Users|work)/", text)] == []


@pytest.mark.parametrize(
    "line",
    [
        "import planner.plan.file",
        "from planner.plan.file import load_plan",
        "from planner.report.data import lanes_of",
        "planner.errors",
        "runtime.executor.executor",
    ],
)
def test_a_private_name_is_seen(line: str) -> None:
    assert list(private_names(ast.parse(line)))


@pytest.mark.thorough
@pytest.mark.slow
def test_attributes_and_arguments_are_those_that_there_are(tmp_path: Path) -> None:
    """A type checker finds what was renamed in the packages, in all notebooks at once; most of them run rarely."""
    for path in NOTEBOOKS:
        cells = [cell.source for cell in code_of(read(path)) if not cell.source.startswith("%%")]
        lines = [line for cell in cells for line in cell.splitlines() if not line.startswith("!")]
        (tmp_path / f"notebook_{path.stem[0]}.py").write_text("\n".join(lines) + "\n")
    settings = ("--config-file", "pyproject.toml", "--ignore-missing-imports", "--disable-error-code=var-annotated")
    untyped = (
        "--allow-redefinition",
        "--no-strict-optional",
        "--allow-untyped-defs",
        "--allow-untyped-calls",
        "--allow-incomplete-defs",
    )
    command = [sys.executable, "-m", "mypy", *settings, *untyped, *map(str, tmp_path.glob("*.py"))]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_it_runs_from_top_to_bottom(path: Path) -> None:
    notebook = executed(path)  # raises for the first cell that fails
    assert all(cell.execution_count for cell in code_of(notebook))
