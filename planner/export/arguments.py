"""Options of a command line, as shell scripts have them: written one to a line, and read out of any script.

torchrun --nnodes 2 ... pretrain_gpt.py \\        options of the launcher and of the program are told apart
    --tensor-model-parallel-size $TP \\           by their names; variables that the script sets are known
    --swiglu                                     an option without a value is a flag
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from planner.export.description import ExportError

Option = tuple[str, Sequence[object]]
"""`--name` and its values; a flag has none."""

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::-([^}]*))?\}|([A-Za-z_]\w*))")
_NAME = re.compile(r"--[A-Za-z]")


def option(name: str, *values: object) -> Option:
    """An option with its values."""
    return f"--{name}", values


def lines_of(options: Iterable[Option]) -> list[str]:
    """One line for each option, as a shell reads it."""
    return [" ".join((name, *(shlex.quote(_text(value)) for value in values))) for name, values in options]


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


class Options:
    """Options that were read, each at most once: the last one counts, as argparse has it. It is remembered which ones
    were asked for."""

    def __init__(self, found: Mapping[str, tuple[str, ...]]) -> None:
        self._found = dict(found)
        self._asked: set[str] = set()

    @property
    def unread(self) -> tuple[str, ...]:
        """Those that nobody has asked for."""
        return tuple(name for name in self._found if name not in self._asked)

    def flag(self, name: str) -> bool:
        """Whether a flag is set."""
        return self._values(name) is not None

    def words(self, name: str) -> tuple[str, ...]:
        """All values of an option; none where it is not given."""
        return self._values(name) or ()

    def word(self, name: str, default: str = "") -> str:
        values = self._values(name)
        if values is None:
            return default
        if len(values) != 1:
            raise ExportError(f"--{name} has {len(values)} values ({' '.join(values)}); it takes one")
        return values[0]

    def integer(self, name: str, default: int | None = None) -> int | None:
        text = self.word(name)
        if not text:
            return default
        try:
            return int(text)
        except ValueError:
            raise ExportError(f"--{name} {text}: not a whole number; write the number in the file") from None

    def number(self, name: str, default: float) -> float:
        text = self.word(name)
        try:
            return float(text) if text else default
        except ValueError:
            raise ExportError(f"--{name} {text}: not a number; write the number in the file") from None

    def degree(self, name: str) -> int:
        """A whole number of 1 or more, 1 where it is not given."""
        found = self.integer(name, 1)
        assert found is not None
        if found < 1:
            raise ExportError(f"--{name} {found}: a degree is 1 or more")
        return found

    def _values(self, name: str) -> tuple[str, ...] | None:
        self._asked.add(name)
        return self._found.get(name)


def options_in(script: str) -> Options:
    """The options in a script, or in a file that has nothing else. Raises ExportError where quotes do not match."""
    try:
        tokens = shlex.split(script, comments=True)
    except ValueError as error:
        raise ExportError(f"not a shell script: {error}") from error
    variables: dict[str, str] = {}
    found: dict[str, tuple[str, ...]] = {}
    name = None
    for raw in tokens:
        assigned = _ASSIGNMENT.fullmatch(raw)
        if assigned and not assigned[2].startswith("("):
            variables[assigned[1]] = _expanded(assigned[2], variables)
            name = None
            continue
        token = _expanded(_unbracketed(assigned[2] if assigned else raw), variables)
        if _NAME.match(token):
            name, equals, value = token[2:].partition("=")
            found[name] = (value,) if equals else ()
        elif token in ("", ";", "&", "&&", "|", "\n") or "$" in token or token.endswith(".py"):
            name = None
        elif name is not None:
            found[name] = (*found[name], token)
    return Options(found)


def _unbracketed(token: str) -> str:
    """A token without the brackets of the array that it begins or ends; brackets in pairs are its own."""
    if token.count("(") == token.count(")"):
        return token
    return token[1:] if token.startswith("(") else token[:-1] if token.endswith(")") else token


def _expanded(token: str, variables: Mapping[str, str]) -> str:
    """A token with the variables that are known."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[2] if match[2] is not None else match[0])

    return _VARIABLE.sub(value, token)
