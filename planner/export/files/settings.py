"""Settings from a file of nested keys (TOML, YAML, JSON): read by path with a type, with a record of what was read."""

from collections.abc import Mapping
from typing import Any

from planner.export.description import LARGEST, ExportError

_DIGITS = len(str(LARGEST))


def checked_count(where: str, found: int) -> int:
    """The number, if it is within the limit of all sizes. Raises ExportError."""
    if not -LARGEST <= found <= LARGEST:
        raise ExportError(f"{where}: the number is too large: {LARGEST} is the most")
    return found


def size_of(text: str) -> int | None:
    """The text as a number of 1 or more; None if it is none, or too long."""
    found = int(text) if len(text) <= _DIGITS and text.isascii() and text.isdecimal() else 0
    return found or None


class Settings:
    """Values by path, such as "parallelism.tensor_parallel_degree"; remembers which ones were asked for."""

    def __init__(self, content: object, kind: str) -> None:
        """`kind` names the kind of file in errors. Raises ExportError if the content has no keys."""
        if not isinstance(content, Mapping):
            raise ExportError(f"not a {kind} file with keys")
        self._values = dict(_flat("", content))
        self._asked: set[str] = set()

    def unread(self, *sections: str) -> tuple[str, ...]:
        """Keys of these sections that nobody has asked for."""
        inside = tuple(f"{section}." for section in sections)
        return tuple(name for name in self._values if name not in self._asked and name.startswith(inside))

    @property
    def all(self) -> tuple[tuple[str, Any], ...]:
        """Every key with its value."""
        return tuple(self._values.items())

    def has(self, path: str) -> bool:
        """Whether a key has a value."""
        return self.value(path) is not None

    def value(self, path: str) -> Any:
        """The value of a key; None if it is not given. Raises ExportError if a number or a word stands in the place of
        its section."""
        self._asked.add(path)
        found = self._values.get(path)
        if found is None and "." in path:
            self._check_section(path.rpartition(".")[0])
        return found

    def _check_section(self, path: str) -> None:
        there = self._values.get(path)
        if isinstance(there, str | int | float) and not isinstance(there, bool) and there != "":
            raise ExportError(f"{path}: {there!r:.80} stands in the place of a section; write its keys below it")

    def below(self, path: str) -> tuple[Any, ...]:
        """The values of all keys below a path."""
        names = [name for name in self._values if name.startswith(f"{path}.")]
        self._asked.update(names)
        return tuple(self._values[name] for name in names)

    def integer(self, path: str, default: int) -> int:
        """A whole number. Raises ExportError for anything else."""
        found = self.value(path)
        if found is None:
            return default
        if isinstance(found, bool) or not isinstance(found, int):
            raise ExportError(f"{path}: {found!r:.80} is not a whole number")
        return checked_count(path, found)

    def degree(self, path: str, default: int = 1) -> int:
        """A whole number of 1 or more: a degree, a batch, a length. Raises ExportError for anything else."""
        found = self.integer(path, default)
        if found < 1:
            raise ExportError(f"{path}: {found}; write a number of 1 or more")
        return found

    def number(self, path: str, default: float) -> float:
        """A number. Raises ExportError for anything else."""
        found = self.value(path)
        if found is None:
            return default
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise ExportError(f"{path}: {found!r:.80} is not a number")
        return float(found)

    def truth(self, path: str, default: bool = False) -> bool:
        """True or false. Raises ExportError for anything else."""
        found = self.value(path)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise ExportError(f"{path}: {found!r:.80} is neither true nor false")
        return found

    def word(self, path: str, default: str, known: Mapping[str, object] | tuple[str, ...] = ()) -> str:
        """A word; one of the `known` ones if they are given. Raises ExportError for anything else."""
        found = self.value(path)
        if found is None:
            return default
        if not isinstance(found, str) or (known and found not in known):
            hint = f"; known are {', '.join(known)}" if known else " is no word"
            raise ExportError(f"{path}: {found!r:.80}{hint}")
        return found


def _flat(prefix: str, content: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in content.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found += _flat(f"{path}.", value)
        else:
            found.append((path, value))
    return found
