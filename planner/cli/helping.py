"""Help texts: `plan COMMAND --help` prints usage, examples and options by group, one line each; `plan --help` one
screen.

    plan help WORD     the full text of an option; `--help` shows the sentences that fit in a line

Typer's own help wraps descriptions into a narrow column in boxes. Ours is plain text and is made here; the options,
their groups and their texts are where Typer reads them.
"""

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from planner.cli.whole_numbers import check_whole_numbers

_WIDEST, _NARROWEST = 120, 60
_NAMES = 32
"""Width of the column of option names, with two spaces before and after."""
_OPTIONS = "Options"

ABOUT = """\
plan finds the fastest way to train a PyTorch model on many devices.

It searches sharding, pipeline stages, micro-batches, recomputation and ZeRO,
predicts time and memory, and writes a plan: a file to read, edit, run, export.
Options that you give are fixed; the search decides the rest."""

EXAMPLES = (
    "plan --model llama70b --devices 64",
    "plan --model llama70b --devices 64 --hardware h200 --tensor 8 --zero 1",
    "plan --model path/to/config.json --devices 8 --seq-len 32k -o mine.json",
)

COMMON = (
    ("--model NAME", "a zoo model, a config.json, or package.module:factory"),
    ("--devices N", "number of devices"),
    ("--hardware PROFILE", "h100 (default), h200, b200, ..., or my.toml"),
    ("--seq-len N", "sequence length, as in 32k (default: the model's)"),
    ("--global-batch N", "samples per step (default: 4 per device, 32 images)"),
    ("--tensor N ...", "fix a degree; also --pipeline, --data, --expert, --zero"),
    ("--for ENGINE", "the best plan for megatron, torchtitan, deepspeed, ..."),
    ("-o FILE", "where to write the plan"),
)
"""The most used options; these texts are shorter than those in `Options`."""

PURPOSES: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Plan",
        (
            ("search", "the fastest plan; same as plan --model ..."),
            ("estimate, manual", "one configuration; a plan file that you edited"),
            ("compare", "hardware, devices, models: days and cost"),
            ("capacity", "how many devices train N tokens in X days"),
            ("replan", "search again for another profile; what it saves"),
        ),
    ),
    (
        "Understand",
        (
            ("show, verify", "what a plan says; whether it is legal and fits"),
            ("explain, diff", "what limits a plan; what differences cost"),
            ("report, ui", "an HTML page of a plan; the search in a browser"),
        ),
    ),
    (
        "Run",
        (
            ("run, audit, prove", "execute a plan; check it without the cluster"),
            ("checkpoint", "inspect, verify, convert or merge checkpoints"),
            ("export, import", "to and from Megatron, DeepSpeed, torchtitan"),
            ("advise", "what to change in your configuration"),
        ),
    ),
    (
        "Measure",
        (
            ("calibrate, fit", "measure this machine; fit a profile to that"),
            ("validate", "predictions for a table of measured runs"),
        ),
    ),
    (
        "Look up",
        (
            ("models, profiles", "models of the zoo; hardware profiles"),
            ("stacks", "training stacks that predictions know"),
            ("help WORD", "the full text of an option or a command"),
        ),
    ),
)
"""All commands by purpose; some share a line."""


class Command(TyperCommand):
    """A command with our help text and our check of whole numbers."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        check_whole_numbers(self, ctx, args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(command_help(self, ctx))


def screen() -> str:
    """What `plan --help` prints."""
    lines = [ABOUT, "", _heading("Examples"), *(f"  {one}" for one in EXAMPLES), ""]
    lines += [_heading("Common options") + " (all of them: plan search --help)"]
    lines += [f"  {names:<22}{text}" for names, text in COMMON]
    lines += ["", _heading("Commands") + " (plan COMMAND --help has options and examples)"]
    for purpose, commands in PURPOSES:
        for at, (names, text) in enumerate(commands):
            lines.append(f"  {'' if at else purpose:<12}{names:<18}{text}")
    return "\n".join(lines) + "\n"


def command_help(command: Any, ctx: Any) -> str:
    """What `plan COMMAND --help` prints."""
    about, examples = parts_of(command.help or "")
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.get_params(ctx) if one.param_type_name == "option" and not one.hidden]
    required = [f"{_shown_names(one)[0]} {_value(one)}" for one in options if one.required]
    inner = [_argument(one) if one.required else f"[{_argument(one)}]" for one in arguments]
    inner += ["COMMAND"] if getattr(command, "commands", None) else []
    lines = [f"Usage: {' '.join([ctx.command_path, *inner, *required])} [options]", ""]
    for paragraph in about:
        lines += [textwrap.fill(paragraph, _width(), break_on_hyphens=False), ""]
    lines += [_heading("Examples"), *(f"  {one}" for one in examples), ""] if examples else []
    rows = [(name, parts_of(one.help or "")[0][0], "") for name, one in getattr(command, "commands", {}).items()]
    lines += _section("Commands", rows)
    lines += _section("Arguments", [(_argument(one), one.help or "", _default(one)) for one in arguments])
    for group in dict.fromkeys(one.rich_help_panel or _OPTIONS for one in options):
        inside = [one for one in options if (one.rich_help_panel or _OPTIONS) == group]
        lines += _section(group, [(_spelled(one), one.help or "", _default(one)) for one in inside])
    return "\n".join(lines).rstrip() + "\n"


def parts_of(text: str) -> tuple[list[str], list[str]]:
    """The paragraphs of a docstring, each as one line, and its examples: the paragraphs whose lines are all
    commands."""
    paragraphs, examples = list[str](), list[str]()
    for one in text.split("\n\n"):
        lines = [line.strip() for line in one.splitlines() if line.strip()]
        if lines and all(line.startswith("plan ") for line in lines):
            examples += lines
        elif lines:
            paragraphs.append(" ".join(lines))
    return paragraphs, examples


def option_texts(group: Any, word: str) -> list[str]:
    """The full texts of an option, by command if commands differ; empty if no command has it."""
    name, found = word.lstrip("-"), dict[str, list[str]]()
    for path, command in commands_of(group, ""):
        for one in command.params:
            spelled = [each.lstrip("-") for each in (*one.opts, *one.secondary_opts) if each.startswith("-")]
            if name in spelled and not one.hidden:
                default = _default(one)
                text = f"{_spelled(one)}\n" + textwrap.fill(
                    f"{one.help or ''}{default}", _width(), initial_indent="  ", subsequent_indent="  "
                )
                found.setdefault(text, []).append(f"plan {path}")
    return [f"{text}\n  ({', '.join(commands)})" for text, commands in found.items()]


def option_names(group: Any) -> set[str]:
    """All options of all commands."""
    params = [one for _, command in commands_of(group, "") for one in command.params if not one.hidden]
    return {name for one in params for name in (*one.opts, *one.secondary_opts) if name.startswith("--")}


def commands_of(group: Any, path: str) -> Iterable[tuple[str, Any]]:
    """All commands, keyed by what is typed. `path` is put in front and ends with a space if it is not empty."""
    for name, command in group.commands.items():
        if getattr(command, "commands", None):
            yield from commands_of(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def _section(title: str, rows: Sequence[tuple[str, str, str]]) -> list[str]:
    if not rows:
        return []
    names = min(_NAMES, 4 + max(len(name) for name, _, _ in rows))
    lines = [_heading(title)]
    for name, text, default in rows:
        room = _width() - names
        first, *more = textwrap.wrap(_fitting(text, default, room), room, break_on_hyphens=False) or [""]
        lines += [f"  {name}"] if len(name) > names - 4 else []
        lead = "" if len(name) > names - 4 else f"  {name}"
        lines += [f"{lead:<{names}}{first}".rstrip(), *(f"{'':<{names}}{one}" for one in more)]
    return [*lines, ""]


def _fitting(text: str, default: str, room: int) -> str:
    """As many sentences as fit in a line together with the default; at least the first."""
    sentences = text.replace("\n", " ").split(". ")
    for count in range(len(sentences), 1, -1):
        said = ". ".join(sentences[:count]).rstrip(".")
        if len(said + default) <= room:
            return said + default
    return sentences[0].rstrip(".") + default


def _default(parameter: Any) -> str:
    """` (default: 8)` if there is a default to show."""
    shown, value = parameter.show_default, parameter.default
    if isinstance(shown, str):
        return f" (default: {shown})"
    if not shown or value is None or isinstance(value, bool) or parameter.required:
        return ""
    return f" (default: {value:g})" if isinstance(value, float) else f" (default: {value})"


def _shown_names(option: Any) -> tuple[str, str]:
    """The long name of an option, with [no-] for a pair, and the short name."""
    long = next((name for name in option.opts if name.startswith("--")), option.opts[0])
    short = next((name for name in option.opts if not name.startswith("--")), "")
    if option.secondary_opts == [f"--no-{long[2:]}"]:
        long = f"--[no-]{long[2:]}"
    elif option.secondary_opts:
        long = f"{long}, {option.secondary_opts[0]}"
    return long, short if short != long else ""


def _spelled(option: Any) -> str:
    long, short = _shown_names(option)
    return " ".join(filter(None, (f"{short}," if short else "", long, _value(option))))


def _value(option: Any) -> str:
    """What follows an option: its metavar, else a word for its type; nothing for a switch."""
    if getattr(option, "is_flag", False) or option.secondary_opts or option.name == "help":
        return ""
    if option.metavar:
        return str(option.metavar)
    kind = type(option.default)
    named = getattr(getattr(option, "type_descriptor", None), "annotation", None)
    name = str(getattr(named if kind is type(None) else kind, "__name__", "")).lower()
    if name == "bool":
        return ""
    return {"int": "N", "float": "X"}.get(name, "PATH" if "path" in name else "TEXT")


def _argument(argument: Any) -> str:
    return str(argument.metavar or argument.name).upper() + ("..." if argument.nargs != 1 else "")


def _heading(text: str) -> str:
    return typer.style(text, bold=True)


def _width() -> int:
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns))
