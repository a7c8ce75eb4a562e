"""Errors in how a command was called, in one line that says what to do, like every other error.

The parser has its own messages, in boxes and without the nearest names. They are rewritten here in our form, so that
all messages look alike and `--json` answers every call with an object.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from planner.cli.commands.manual import as_command
from planner.cli.errors import reporting
from planner.cli.helping import command_help, screen
from planner.cli.texts import say
from planner.cli.whole_numbers import check_whole_numbers, legal_numbers
from planner.errors import ModelError, RequestError, StoppedError, did_you_mean, unknown_name
from planner.old_words import with_new_options

_ParserError: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if issubclass(base, Exception) and base.__name__ == "ClickException"
)
"""Base class of the parser's errors; newer versions of Typer have their own."""


ENOUGH = 128 + 13
"""Exit code if stdout closed, as in `plan show plan.json | head`: that of SIGPIPE in a shell."""


class Commands(TyperGroup):
    """The group of all commands. A wrong call prints one line on stderr, or an object with `--json`."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *rest: Any, **settings: Any) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        settings["standalone_mode"] = False
        try:
            try:
                with reporting("--json" in given):
                    code = self._called(given, prog_name, *rest, **settings)
            except typer.Exit as ended:
                code = ended.exit_code
            sys.stdout.flush()
        except (BrokenPipeError, SystemExit) as error:
            if not _has_enough(error):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python writes at exit
            code = ENOUGH
        sys.exit(code if isinstance(code, int) else 0)

    def _called(self, given: list[str], *rest: Any, **settings: Any) -> Any:
        given[:], said = with_new_options("run" if given[:1] == ["run"] else "plan", given)
        for line in said:
            say(f"plan: {line}", err=True)
        given[:] = as_command(given, self.commands)
        try:
            return super().main(given, *rest, **settings)
        except _ParserError as error:
            raise RequestError(fault_of(error, given)) from error
        except typer.Abort as error:
            raise KeyboardInterrupt from error

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        check_whole_numbers(self, ctx, args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(screen() if ctx.parent is None else command_help(self, ctx))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except StoppedError:
            raise
        except SystemExit as error:  # no other command of ours exits like that
            if _has_enough(error):
                raise
            raise RequestError(
                f"the Python code of --model or --dataset ended the process (exit code {error.code}); take the exit out"
                " of it"
            ) from error

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            raise RequestError(_no_command(args[0], list(self.commands)))
        return super().resolve_command(ctx, args)


def _has_enough(error: BaseException) -> bool:
    """Whether stdout closed: then the parser and rich end the process."""
    return isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError)


def _no_command(word: str, known: Sequence[str]) -> str:
    from planner.models.nicknames import full_model
    from planner.models.zoo import is_of_zoo

    if os.path.isfile(word):
        return f"'{word}' is a file, not a command; to see what is in it: plan show {word}"
    with contextlib.suppress(ModelError):
        if is_of_zoo(full_model(word) or ""):
            return f"'{word}' is a model, not a command; to plan it: plan --model {word}"
    return unknown_name("command", word, known)


def fault_of(error: Any, given: Sequence[str]) -> str:
    """The parser's complaint: the option, the given value, the nearest names, and where to read more."""
    context = getattr(error, "ctx", None)
    place = context.command_path if context is not None else "plan"
    option = getattr(error, "option_name", None)
    if option is not None and hasattr(error, "possibilities"):
        known = [name for one in context.command.params for name in (*one.opts, *one.secondary_opts)] if context else []
        known = [name for name in known if name.startswith("-")]
        meant = did_you_mean(option, known)
        hint = f"{meant} " if meant else ""
        return f"{place} has no option '{option}'; {hint}{_help_of(place)} lists all options"
    message = error.format_message().rstrip(".")
    parameter = getattr(error, "param", None)
    names = [name for name in getattr(parameter, "opts", ()) if name.startswith("-")]
    said, parted, reason = message.partition(": ")
    if not (names and parted and said.startswith("Invalid value")):
        return f"{message[:1].lower()}{message[1:]}; see {_help_of(place)}"
    legal = legal_numbers(parameter)
    what = f"give {legal}" if legal else f"{reason[:1].lower()}{reason[1:]}; see {_help_of(place)}"
    return f"{_as_given(names, given)}: {what}"


def _help_of(place: str) -> str:
    """The command whose --help lists the options; for bare `plan` that is `plan search`."""
    return "plan search --help" if place == "plan" else f"{place} --help"


def _as_given(names: Sequence[str], given: Sequence[str]) -> str:
    """An option with its given value."""
    for at, word in enumerate(given):
        name, equals, value = word.partition("=")
        if name in names:
            return f"{name} {value if equals else ' '.join(given[at + 1 : at + 2])}"
    return names[-1]
