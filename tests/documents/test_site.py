"""The documentation site: its pages are laid out with links that lead somewhere, and what they show can be typed."""

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

import planner
import runtime
from planner.cli.main import COMMANDS, app
from planner.cli.options import Options, flag
from runtime import integrations

ROOT = Path(__file__).resolve().parents[2]
TASKS = 30

GROUP: Any = typer.main.get_command(app)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The script, which lays out into a folder of ours."""
    spec = importlib.util.spec_from_file_location("site_build", ROOT / "docs" / "site" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("site")
    module.SOURCE, module.SITE = folder / "source", folder / "site"  # type: ignore[attr-defined]
    module.lay_out()  # ends the process where a link is broken
    return module


def test_every_page_is_in_the_navigation_and_every_link_leads_to_a_page(site: ModuleType) -> None:
    pages = {str(path.relative_to(site.SOURCE)) for path in site.SOURCE.rglob("*.md")}
    text = (ROOT / "docs" / "site" / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r": ([\w/-]+\.md)$", text[text.index("\nnav:") :], re.MULTILINE)
    assert sorted(named) == sorted(pages)
    for page in site.SOURCE.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", target) and "`" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_reference_has_every_command_option_function_and_error(site: ModuleType) -> None:
    written = {path.stem: path.read_text(encoding="utf-8") for path in (site.SOURCE / "reference").iterdir()}
    assert [name for name in COMMANDS if f"## `plan {name}`" not in written["cli"]] == []
    options = [flag(name) for name in Options.__dataclass_fields__]
    assert [one for one in options if one[2:] not in written["cli"]] == []
    assert [name for name in planner.__all__ if f".{name}\n" not in written["python"]] == []
    assert [name for name in (*runtime.__all__, *integrations.__all__) if f".{name}\n" not in written["python"]] == []
    for word in ("InfeasibleError", "| 3 |", "| 141 |"):
        assert word in written["errors"]
    for word in ("`schema_version`", "## Group", "`activations_home`"):
        assert word in written["plan-file"]
    assert "h100-80gb" in written["profiles"]
    assert "`megatron`" in written["engines"]


def shown_commands() -> list[str]:
    """Every line of the pages that begins with the command."""
    pages = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
    found = (re.findall(r"^ {4,8}(plan .*)$", page.read_text(encoding="utf-8"), re.MULTILINE) for page in pages)
    return list(dict.fromkeys(line for lines in found for line in lines if not re.search(r"\[|…|\.\.\.", line)))


def test_every_command_that_a_page_shows_has_options_that_there_are() -> None:
    lines = shown_commands()
    assert len(lines) > 60
    for line in lines:
        words = shlex.split(line.partition("  #")[0].rstrip("\\").partition(" | ")[0].partition(" && ")[0])[1:]
        command, path = GROUP, "plan"
        while words and words[0] in getattr(command, "commands", {}):
            path = f"{path} {words[0]}"
            command = command.commands[words.pop(0)]
        context = command.make_context(path, [], resilient_parsing=True)
        command.make_parser(context).parse_args(list(words))  # raises NoSuchOption


def test_thirty_tasks_each_a_command_or_ten_lines() -> None:
    text = (ROOT / "docs" / "how-to.md").read_text(encoding="utf-8")
    tasks = re.split(r"^(\d+)\. ", text, flags=re.MULTILINE)[1:]
    assert [int(number) for number in tasks[::2]] == list(range(1, TASKS + 1))
    for number, task in zip(tasks[::2], tasks[1::2], strict=True):
        lines = [line for line in task.splitlines() if line.startswith("        ")]
        assert len(lines) == 1 or (len(lines) <= 10 and lines[0].strip().startswith("import ")), number
        assert lines[0].strip().startswith(("plan ", "import ")), number


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_site_is_built_strictly_and_fetches_nothing() -> None:
    """Where mkdocs is: `make docs` installs it."""
    program = ROOT / ".venv-docs" / "bin" / "mkdocs"
    found = str(program) if program.exists() else shutil.which("mkdocs")
    if found is None:
        pytest.skip("no mkdocs; make docs installs it")
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "site" / "build.py"), "--mkdocs", found],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
