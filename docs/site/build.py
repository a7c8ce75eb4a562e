"""Builds the documentation site into build/docs: `make docs`.

    docs/*.md, README.md, ...    with links as on the site  ─▶ build/docs-source ─ mkdocs ─▶ build/docs
    options, errors, profiles    as pages of the reference  ─▶

The pages of docs/ are read in the repository too: they stay where they are, and here they are copied, with links to
files of the repository as plain names. The reference is made of what the code says of itself. Nothing is fetched, and
the finished site loads nothing from elsewhere, which is checked.

    python docs/site/build.py [--mkdocs PATH]      PATH of the program, where it is not that beside this Python
"""

import argparse
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import typer
from typer.testing import CliRunner

import planner
import runtime
from planner import errors
from planner.cli.helping import _default, _spelled, commands_of, parts_of
from planner.cli.main import app
from planner.engines.spaces import SPACES
from planner.plan import plan as plan_records
from planner.plan import schema
from runtime import integrations

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCE, SITE = ROOT / "build" / "docs-source", ROOT / "build" / "docs"

MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "notebooks/README.md": "notebooks.md",
}
"""Pages outside of docs/, and where they are on the site."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~)")
ELSEWHERE = re.compile(r"""(?:src|href)=["']?(?:https?:)?//[^"'\s>]+\.(?:js|css|woff2?|png|svg)""")
"""What a page of the site would fetch."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--mkdocs", default=str(Path(sys.executable).with_name("mkdocs")))
    given = arguments.parse_args()
    lay_out()
    command = [given.mkdocs, "build", "--strict", "--quiet", "--config-file", str(HERE / "mkdocs.yml")]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    if code := subprocess.run(command, check=False, env=quiet).returncode:
        sys.exit(code)
    if fetched := sorted({f"{page.name}: {found}" for page in SITE.rglob("*.html") for found in fetches(page)}):
        sys.exit("the site would fetch: " + "; ".join(fetched[:5]))
    print(f"{len(list(SITE.rglob('*.html')))} pages in {SITE / 'index.html'}")


def lay_out() -> None:
    """Copy the pages, with their links as on the site, and write those of the reference."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    (SOURCE / "reference").mkdir(parents=True)
    pages = {f"docs/{path.name}": path.name for path in (ROOT / "docs").glob("*.md")} | MOVED
    for origin, name in pages.items():
        text = (ROOT / origin).read_text(encoding="utf-8")
        (SOURCE / name).write_text(linked(text, (ROOT / origin).parent, pages), encoding="utf-8")
    for path in (ROOT / "docs").iterdir():
        if path.suffix in (".svg", ".png", ".json"):
            shutil.copy(path, SOURCE / path.name)
    for name, text in reference():
        (SOURCE / "reference" / name).write_text(text, encoding="utf-8")


def linked(text: str, folder: Path, pages: dict[str, str]) -> str:
    """A page with links that work on the site: to other pages, to copied files; others become plain words."""

    def replaced(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        path, hash_, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return found[0]
        resolved = (folder / path).resolve()
        if not resolved.exists():
            sys.exit(f"broken link: {target} in {folder}")
        known = str(resolved.relative_to(ROOT)).removesuffix("/")
        known = f"{known}/README.md" if resolved.is_dir() else known
        if known in pages:
            return f"{picture}[{words}]({pages[known]}{hash_}{anchor})"
        if resolved.parent == ROOT / "docs":
            return f"{picture}[{words}]({resolved.name})"
        return words

    lines, fenced = [], False
    for line in text.splitlines():
        fenced ^= bool(FENCE.match(line.strip()))
        lines.append(line if fenced or line.startswith("    ") else LINK.sub(replaced, line))
    return "\n".join(lines) + "\n"


def fetches(page: Path) -> Iterator[str]:
    """What a page of the site would fetch from elsewhere."""
    text = page.read_text(encoding="utf-8")
    yield from ELSEWHERE.findall(text)


def reference() -> Iterator[tuple[str, str]]:
    """Pages of the reference: name and text."""
    yield "cli.md", command_line()
    yield "python.md", python_functions()
    yield "plan-file.md", plan_file()
    yield "errors.md", error_tree()
    yield "engines.md", engines()
    for name, title, about in (
        ("models", "Models of the zoo", "`plan models NAME` shows one with its dimensions and where they are from."),
        ("profiles", "Hardware profiles", "`plan profiles NAME` shows every number of one with its source."),
        ("stacks", "Training stacks", "`plan stacks NAME` shows the source of every number."),
    ):
        printed = CliRunner(env={"COLUMNS": "110"}).invoke(app, [name]).output
        yield f"{name}.md", f"# {title}\n\n{about}\n\n```text\n{printed.strip()}\n```\n"


def command_line() -> str:
    """Every command with its examples and options, from what `--help` reads."""
    lines = [
        "# Command line",
        "",
        "`plan --help` fits on a screen; this page has every option with its whole text.",
        "",
    ]
    group = typer.main.get_command(app)
    for path, command in sorted(commands_of(group, "plan ")):
        about, examples = parts_of(command.help or "")
        lines += [f"## `{path}`", "", *(f"{escaped(one)}\n" for one in about)]
        lines += ["```text", *examples, "```", ""] if examples else []
        options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
        for one in command.params:
            if one.param_type_name == "argument":
                lines += [f"- `{(one.metavar or one.name).upper()}`: {escaped(one.help or '')}"]
        lines += [""]
        for panel in dict.fromkeys(one.rich_help_panel or "Options" for one in options):
            lines += [f"**{panel}**", "", "| option | |", "|---|---|"]
            for one in options:
                if (one.rich_help_panel or "Options") == panel:
                    text = escaped(f"{one.help or ''}{_default(one)}")
                    lines.append(f"| `{_spelled(one).replace('|', chr(92) + '|')}` | {text} |")
            lines += [""]
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Text as it is, in Markdown: patterns and brackets are no markup."""
    flat = " ".join(text.split())
    return re.sub(r"([*_<>\[\]|])", r"\\\1", flat)


def python_functions() -> str:
    """The public names, each from its own signature and docstring."""
    lines = [
        "# Python functions",
        "",
        "`import planner` has these names; [From Python](../python.md) shows them at work.",
        "",
    ]
    for name in planner.__all__:
        lines += [f"::: {planner._LAZY[name]}.{name}", ""]
    lines += ["# Running", "", "`import runtime` on every rank; [Running a plan](../running.md) shows it at work.", ""]
    for name in runtime.__all__:
        lines += [f"::: {runtime._HOMES[name]}.{name}", ""]
    lines += ["# Under other training loops", "", "[Trainer and Lightning](../integrations.md) shows them at work.", ""]
    for name in integrations.__all__:
        lines += [f"::: {integrations._HOMES[name]}.{name}", "    options: {members: false}", ""]
    return "\n".join(lines)


def plan_file() -> str:
    """The sections of a plan file, from the form that is checked and the records that say what it means."""
    lines = [
        "# Plan file",
        "",
        f"JSON with `schema_version` {plan_records.SCHEMA_VERSION}. It is data: nothing in it is imported, called or"
        " opened."
        " Unknown keys are refused. [Working with plans](../plans.md) says what to do with it.",
        "",
    ]
    meaning = {
        "Model": plan_records.ModelReference,
        "Training": plan_records.Training,
        "Cluster": plan_records.ClusterReference,
        "Stage": plan_records.Stage,
        "Group": plan_records.Group,
        "Prediction": plan_records.Prediction,
        "Provenance": plan_records.Provenance,
        "Outline": plan_records.Outline,
    }
    forms = [
        one for _, one in inspect.getmembers(schema, inspect.isclass) if one.__name__.endswith(("Section", "File"))
    ]
    for form in sorted(forms, key=lambda one: (one is not schema.PlanFile, one.__name__)):
        name = form.__name__.removesuffix("Section")
        lines += [f"## {'The whole file' if form is schema.PlanFile else name}", ""]
        record = meaning.get(name)
        about = inspect.getdoc(record) if record else ""
        lines += [about.replace("\n    ", "\n"), ""] if about else []
        lines += ["| key | type | |", "|---|---|---|"]
        for key, field in form.model_fields.items():
            kind = re.sub(r"\w+\.", "", str(field.annotation)).replace("<class '", "").replace("'>", "")
            default = "" if field.is_required() else f"optional: `{field.default!r}`"
            lines.append(f"| `{key}` | `{kind.replace('|', chr(92) + '|')}` | {default} |")
        lines += [""]
    return "\n".join(lines)


def error_tree() -> str:
    """Every error that is raised on purpose, and what programs see of it."""
    tree = "\n".join(line[4:] for line in (errors.__doc__ or "").splitlines() if line.startswith("    "))
    lines = [
        "# Errors and exit codes",
        "",
        "Every error is a `planner.PlannerError`; the command prints one line on stderr, with `--json` an object"
        " (`error.kind`, `error.message`) on stdout.",
        "",
        "```text",
        tree,
        "```",
        "",
        "| error | exit code | |",
        "|---|---|---|",
    ]
    for name, one in inspect.getmembers(errors, inspect.isclass):
        if issubclass(one, errors.PlannerError):
            lines.append(
                f"| `{name}` | {one.exit_code} | {escaped((inspect.getdoc(one) or '').partition(chr(10) * 2)[0])} |"
            )
    text = (ROOT / "docs" / "models-and-machines.md").read_text(encoding="utf-8")
    codes = text[text.index("| exit code |") :]
    return "\n".join([*lines, "", codes])


def engines() -> str:
    """Engines that plans are searched for."""
    lines = [
        "# Engines",
        "",
        "`plan --for NAME` searches the best plan that the engine can be told, priced by its own training stack;"
        " [Plans for other engines](../exports.md) says what each setting means, and what else `plan export` knows.",
        "",
        "| `--for` | engine | priced as | optimizers | precisions | experts |",
        "|---|---|---|---|---|---|",
    ]
    for name, space in sorted(SPACES.items()):
        lines.append(
            f"| `{name}` | {space.title} | `{space.software}` | {', '.join(space.optimizers)} |"
            f" {', '.join(space.precisions)} | {'yes' if space.experts else 'no'} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
