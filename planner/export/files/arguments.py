"""Options of a command line, as shell scripts have them: written one to a line, and read out of any script.

torchrun --nnodes 2 ... pretrain_gpt.py \\        options of the launcher and of the program are told apart
    --tensor-model-parallel-size $TP \\           by their names; variables that the script sets are known
    --swiglu                                     an option without a value is a flag
"""

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from planner.export.description import ExportError
from planner.export.files.settings import checked_count
from planner.export.files.shell_words import Variables, scheduled_devices, words_of

Option = tuple[str, Sequence[object]]
"""`--name` and its values; a flag has none."""

_NAME = re.compile(r"--[A-Za-z]")
_HERE = re.compile(r"<<-?[ \t]*[\"']?([A-Za-z_]\w*)")
_REDIRECTION = re.compile(r"\d?[<>]")


def option(name: str, *values: object) -> Option:
    """An option with its values."""
    return f"--{name}", values


def lines_of(options: Iterable[Option]) -> list[str]:
    """One line for each option, as a shell reads it."""
    return [" ".join((name, *(shlex.quote(_text(value)) for value in values))) for name, values in options]


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


class Options:
    """Options that were read, each at most once: the last one counts, as in argparse.

    It is remembered which ones were asked for.

    Attributes:
        programs: names of Python files among them.
        scheduled: devices that the script requests from Slurm; None if unknown.
        variables: variables that the script sets.
        named: name of the model, if the launcher has one.
        notes: what is read differently from the text.
    """

    def __init__(
        self,
        found: Mapping[str, tuple[str, ...]],
        programs: Iterable[str] = (),
        scheduled: int | None = None,
        *,
        variables: Mapping[str, str] | None = None,
        named: str = "",
        notes: Iterable[str] = (),
    ) -> None:
        self._found = dict(found)
        self.programs = tuple(programs)
        self.scheduled = scheduled
        self.variables = dict(variables or {})
        self.named = named
        self.notes = tuple(notes)
        self._asked: set[str] = set()

    @property
    def unread(self) -> tuple[str, ...]:
        """Options that nobody has asked for."""
        return tuple(name for name in self._found if name not in self._asked)

    @property
    def all(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Every option with its values."""
        return tuple(self._found.items())

    def flag(self, name: str) -> bool:
        """Whether a flag is set."""
        return self._values(name) is not None

    def words(self, name: str) -> tuple[str, ...]:
        """All values of an option; empty if it is not given."""
        return self._values(name) or ()

    def word(self, name: str, default: str = "") -> str:
        """The single value of an option. Raises ExportError for several values."""
        values = self._values(name)
        if values is None:
            return default
        if len(values) > 1 and values[0].startswith("$(("):
            raise ExportError(
                f"--{name} {' '.join(values):.80}: a sum of what the file does not set; write the number in the file"
            )
        if len(values) != 1:
            raise ExportError(f"--{name} has {len(values)} values ({' '.join(values):.80}); it takes one")
        return values[0]

    def integer(self, name: str, default: int | None = None) -> int | None:
        """A whole number. Raises ExportError for anything else."""
        text = self.word(name)
        if not text:
            return default
        try:
            found = int(text)
        except ValueError:
            raise ExportError(
                f"--{name} {text:.80}: {_fault(text)} whole number; write the number in the file"
            ) from None
        return checked_count(f"--{name}", found)

    def number(self, name: str, default: float) -> float:
        """A finite number. Raises ExportError for anything else."""
        text = self.word(name)
        try:
            found = float(text) if text else default
        except ValueError:
            found = math.nan
        if not math.isfinite(found):
            raise ExportError(f"--{name} {text:.80}: {_fault(text)} number; write the number in the file")
        return found

    def degree(self, name: str, default: int = 1) -> int:
        """A whole number of 1 or more: a degree, a batch, a length. Raises ExportError for anything else."""
        found = self.size(name)
        return default if found is None else found

    def size(self, name: str) -> int | None:
        """A whole number of 1 or more; None if it is not given. Raises ExportError for anything else."""
        found = self.integer(name)
        if found is not None and found < 1:
            raise ExportError(f"--{name} {found}: write a number of 1 or more")
        return found

    def _values(self, name: str) -> tuple[str, ...] | None:
        self._asked.add(name)
        return self._found.get(name)


def _fault(text: str) -> str:
    if re.match(r"\$\{?\d", text):
        return "an argument that the script itself is given, and no"
    return "a variable that the file does not set, and no" if text.startswith("$") else "not a"


def options_in(script: str) -> Options:
    """The options in a script, or in a file of options only.

    Raises ExportError if quotes do not match, or if the script or the values of its variables are too long.
    """
    found: dict[str, list[str]] = {}
    programs: list[str] = []
    variables, name = Variables(), None
    ends = set(_HERE.findall(script))  # ends of here-documents
    for word in words_of(script, variables):
        if _NAME.match(word):
            name, equals, value = word[2:].partition("=")
            found[name] = [value] if equals else []
        elif word.endswith(".py"):
            programs.append(word.rpartition("/")[2])
            name = None
        elif not word or word in ends or _REDIRECTION.match(word) or (name is not None and "$" in word and found[name]):
            name = None
        elif name is not None:
            found[name].append(word)
    return Options(
        {name: tuple(values) for name, values in found.items()},
        programs,
        scheduled_devices(script),
        variables=variables.known,
        notes=variables.notes,
    )
