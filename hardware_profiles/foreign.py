"""Files from outside, read within limits: whatever they contain, reading ends, takes little memory and runs nothing.

    path ─ read_text ─▶ text ─ parse_json, parse_toml, parse_csv, parse_python ─▶ plain values ─ pydantic ─▶ our values
           regular file        size, depth, number of values, duplicate keys,
           size, UTF-8         numbers of 64 bits, no NaN

Every reader of such files goes through here; `parse_yaml` (`export.files.yaml_files`) keeps the same limits. All raise
`ForeignTextError`, which does not name the file: the caller adds its name, and what it should be.
"""

import ast
import csv
import io
import json
import math
import os
import stat
import tomllib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from hardware_profiles.errors import HardwareProfileError

_WORD = 2**63  # numbers must be below this, the limit of signed 64 bits
_POINTS = 1000  # points in one line of TOML: its parser takes quadratic time for a.a.a.a
_COLUMNS = 1000
_CELL = 2**14  # characters
_SHOWN = 40  # characters of a value in a message
_NO_OBJECT = frozenset({"model_type", "dict_type", "dataclass_type"})  # pydantic's message names one of our classes
_KEYS = {"missing": "the key is missing", "extra_forbidden": "unknown key"}
_WHOLE, _NUMBER, _BOOLEAN, _LIST = "a whole number", "a number", "true or false", "a list"
_WANTED = {
    "int_type": _WHOLE, "int_parsing": _WHOLE, "int_from_float": _WHOLE, "float_type": _NUMBER,
    "float_parsing": _NUMBER, "finite_number": "a finite number", "bool_type": _BOOLEAN, "bool_parsing": _BOOLEAN,
    "string_type": "text", "list_type": _LIST, "tuple_type": _LIST,
}  # fmt: skip
"""What a value should be, by the kind of the fault."""
_LIMITS = {
    "greater_than_equal": ("ge", "less than"),
    "greater_than": ("gt", "not more than"),
    "less_than_equal": ("le", "more than"),
    "less_than": ("lt", "not less than"),
}
"""Where the limit stands in the fault, and how it is said."""


class ForeignTextError(HardwareProfileError):
    """A file or a text that cannot be read; has the reason and, if known, the line."""


class AbsentFileError(ForeignTextError):
    """The file does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a text: `size` in bytes, nesting `depth`, number of `values` in all (aliases count each time), and
    whether all numbers must be `finite`."""

    size: int = 2**26
    depth: int = 64
    values: int = 2**22
    finite: bool = True


USUAL = Limits()
SETTINGS = Limits(size=2**20, values=2**17)
"""Limits of files that people write by hand: profiles, settings, scripts."""


def read_bytes(path: str | os.PathLike[str], size: int = USUAL.size, *, follow: bool = True) -> bytes:
    """The content of a regular file of at most `size` bytes.

    Pipes and devices are refused, because reading them may never end. Symbolic links are followed unless `follow` is
    False.

    Raises:
        AbsentFileError: there is no such file.
        ForeignTextError: it cannot be read, is not a regular file, or is too large.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    except FileNotFoundError as error:
        raise AbsentFileError(f"cannot be read: {error.strerror}") from error
    except OSError as error:
        raise ForeignTextError(f"cannot be read: {error.strerror}") from error
    except ValueError as error:  # the name has a zero byte, or half a surrogate pair
        raise ForeignTextError(f"cannot be read: its name: {error}") from error
    try:
        content = _regular(descriptor, size)
    except OSError as error:
        raise ForeignTextError(f"cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    if len(content) > size:
        raise ForeignTextError(f"cannot be read: it is larger than {size} bytes, the most for such a file")
    return content


def _regular(descriptor: int, size: int) -> bytes:
    """The content of a file, at most `size` + 1 bytes of it."""
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        what = "it is a directory" if stat.S_ISDIR(mode) else "it is a pipe or a device, and not a regular file"
        raise ForeignTextError(f"cannot be read: {what}")
    with open(descriptor, "rb", closefd=False) as file:
        return file.read(size + 1)


def read_text(path: str | os.PathLike[str], size: int = USUAL.size, *, follow: bool = True) -> str:
    """The text of a regular file in UTF-8, without a byte order mark. Raises: as `read_bytes`, and for other
    encodings."""
    return decoded(read_bytes(path, size, follow=follow))


def decoded(content: bytes) -> str:
    """Bytes as text. Raises `ForeignTextError` if they are not UTF-8, or contain a zero."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ForeignTextError(f"cannot be read: it is not UTF-8 text (byte {error.start})") from error
    if "\0" in text:
        raise ForeignTextError(f"cannot be read: it is not text: character {text.index(chr(0))} is a zero")
    return text


def parse_json(text: str, limits: Limits = USUAL) -> Any:
    """The value of a JSON text whose keys are unique. Raises `ForeignTextError` if it is not valid or exceeds
    `limits`."""
    _check_size(text, limits)
    if text.count(",") + text.count("[") + text.count("{") > limits.values:
        raise ForeignTextError(f"it has more than {limits.values} values")
    if not text.strip():
        raise ForeignTextError("it is empty")
    try:
        found = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ForeignTextError(f"not valid JSON at line {error.lineno}, column {error.colno} ({error.msg})") from error
    except RecursionError as error:
        raise _too_deep(limits) from error
    except ValueError as error:
        raise _said(error) from error
    check_values(found, limits)
    return found


def parse_toml(text: str, limits: Limits = SETTINGS) -> dict[str, Any]:
    """The tables of a TOML text. Raises `ForeignTextError` if it is not valid or exceeds `limits`."""
    _check_size(text, limits)
    for number, line in enumerate(text.splitlines(), start=1):
        if line.count(".") > _POINTS:
            raise ForeignTextError(f"line {number} has more than {_POINTS} points; break it up")
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ForeignTextError(f"not a TOML file: {error}") from error
    except RecursionError as error:
        raise _too_deep(limits) from error
    except ValueError as error:
        raise _said(error) from error
    check_values(found, limits)
    return found


def parse_csv(text: str, limits: Limits = USUAL) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV text, each with the number of its first line; empty lines are left out.

    Raises `ForeignTextError` for the first row that cannot be read.
    """
    for line, cells in parse_csv_leniently(text, limits):
        if isinstance(cells, str):
            raise ForeignTextError(f"line {line}: {cells}")
        yield line, cells


def parse_csv_leniently(text: str, limits: Limits = USUAL) -> Iterator[tuple[int, list[str] | str]]:
    """As `parse_csv`, but yields the reason in place of a row that cannot be read.

        3   "Llama 8B,64          a quote opens here
        4   "Mixtral 8x7B",64     and seems to be closed here

    If several lines make no row together, or a row of another width than the first row, only the first of them is bad:
    reading goes on at the second. So an unclosed quote costs one row.
    """
    _check_size(text, limits)
    lines = _Lines(list(io.StringIO(text, newline="")))
    reader, values, width = csv.reader(lines, strict=True), 0, 0
    while lines.at < len(lines.lines):
        first = lines.at
        try:
            cells = next(reader)
        except csv.Error as error:
            open_ended = lines.at == len(lines.lines) and "end of data" in str(error)
            why = "a quote opens here and is never closed" if open_ended else str(error)
            found: list[str] | str = f"{why}; double a quote within quotes"
        else:
            found, values = cells, values + len(cells)
            width = width or len(cells)
            if values > limits.values:
                raise ForeignTextError(f"line {first + 1}: {values} cells so far; there are {limits.values} at most")
            if len(cells) > _COLUMNS:
                found = f"{len(cells)} cells; there are {_COLUMNS} columns at most"
            elif max(map(len, cells), default=0) > _CELL:
                found = f"a cell has more than {_CELL} characters"
            elif lines.at > first + 1 and len(cells) != width:
                found = f"a quote opens here and is closed in line {lines.at}, which makes {len(cells)} cells"
        if isinstance(found, str):
            lines.at = first + 1
        if found:
            yield first + 1, found


class _Lines:
    """An iterator over lines whose position can be set."""

    def __init__(self, lines: list[str]) -> None:
        self.lines, self.at = lines, 0

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        if self.at == len(self.lines):
            raise StopIteration
        self.at += 1
        return self.lines[self.at - 1]


def parse_python(text: str, limits: Limits = SETTINGS) -> ast.Module:
    """The syntax tree of a Python text; nothing is run. Its depth is limited, so that walks along it cannot overflow.

    Raises `ForeignTextError` if it is not valid or exceeds `limits`.
    """
    _check_size(text, limits)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about strange escapes, on stderr
            tree = ast.parse(text)
    except SyntaxError as error:
        where = f" at line {error.lineno}" if error.lineno else ""
        raise ForeignTextError(f"not a Python file: {error.msg}{where}") from error
    except (RecursionError, MemoryError) as error:
        raise _too_deep(limits) from error
    except ValueError as error:
        raise _said(error) from error
    level: list[ast.AST] = [tree]
    for _ in range(limits.depth):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise _too_deep(limits)
    return tree


def literal(node: ast.expr, limits: Limits = SETTINGS) -> Any:
    """The plain value that a node of a syntax tree denotes. Raises `ForeignTextError` for anything else."""
    try:
        found = ast.literal_eval(node)
    except (ValueError, TypeError) as error:  # a name or a call; a list as a key
        raise ForeignTextError(f"line {node.lineno}: {ast.unparse(node)[:80]} is no plain value") from error
    check_values(found, limits)
    return found


def check_values(value: Any, limits: Limits) -> None:
    """Raise `ForeignTextError` if a value nests too deeply, has too many values, or contains an unreadable number or
    text."""
    level, count = [value], 0
    for depth in range(limits.depth + 2):
        count += len(level)
        if count > limits.values:
            raise ForeignTextError(f"it has more than {limits.values} values")
        following: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                following += node
                following += node.values()
            elif isinstance(node, list | tuple | set):
                following += node
            elif (fault := _fault(node, limits)) is not None:
                raise ForeignTextError(f"{_place_of(node, value)}: {fault}")
        level = following
        if level and depth > limits.depth:
            raise _too_deep(limits)
        if not level:
            return


def _fault(value: Any, limits: Limits) -> str | None:
    """Why a single value cannot be read; None if it can."""
    if isinstance(value, int) and not -_WORD <= value < _WORD:
        return f"the number {_short(value)} does not fit in 64 bits"
    if isinstance(value, float) and limits.finite and not math.isfinite(value):
        return "NaN and infinity are not read, nor numbers beyond 1.8e308; write a finite number"
    if isinstance(value, str) and ("\0" in value or not _encodes(value)):
        return f"the text {value[:40]!a} has a zero, or half a surrogate pair, in it; remove it"
    return None


def printable(text: str, keep: str = "") -> str:
    """Foreign text made safe to print: characters that are not printable are written as escapes, except those in
    `keep`."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def _place_of(wanted: Any, value: Any) -> str:
    """The path of a value inside another one, as in groups.3.name; for a key, the path of its mapping."""
    waiting = [("", value)]
    while waiting:
        place, node = waiting.pop()
        if node is wanted:
            break
        if isinstance(node, dict):
            waiting += [(place, key) for key in node]
        pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list | tuple) else ()
        waiting += [(f"{place}.{key!s:.80}", child) for key, child in pairs]
    return "".join(c if c.isprintable() else "?" for c in place.removeprefix(".")) or "the file"


def _short(value: int) -> str:
    """A number as text; its bits if it has too many digits to write."""
    bits = value.bit_length()
    return str(value) if bits < 200 else f"of {bits} bits"


def _encodes(text: str) -> bool:
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ForeignTextError(f"the key {key[:80]!r} stands twice in one object; keep one of them")
        found[key] = value
    return found


def _check_size(text: str, limits: Limits) -> None:
    if len(text) > limits.size:
        raise ForeignTextError(f"{len(text)} characters are too many; at most {limits.size} for such a file")


def _too_deep(limits: Limits) -> ForeignTextError:
    return ForeignTextError(f"nested too deeply: at most {limits.depth} levels")


def _said(error: ValueError) -> ForeignTextError:
    """An error of a parser without a place: our own, or that of a number with thousands of digits."""
    if isinstance(error, ForeignTextError):
        return error
    return ForeignTextError(f"a number is too long ({str(error).partition(';')[0]})")


def form_fault(error: ValidationError) -> str:
    """The first place that does not fit a pydantic model, the reason, and how many more there are. An unknown key
    beside a missing one is named with it: it may be misspelled."""
    first, *others = error.errors(include_url=False)
    place = ".".join(str(part) for part in first["loc"]) or "the file"
    beside = [one for one in others if one["type"] == "extra_forbidden" and one["loc"][:-1] == first["loc"][:-1]]
    if first["type"] == "missing" and beside:
        others.remove(beside[0])
        unknown = f"; unknown key {_shortened(beside[0]['loc'][-1])}"
    else:
        unknown = ""
    more = f" (and {len(others)} more)" if others else ""
    return f"{place}: {_reason(first)}{unknown}{more}"


def _reason(fault: Any) -> str:
    """What is wrong with a value, from pydantic's details. Kinds of faults without an entry keep pydantic's words."""
    kind, limits = fault["type"], fault.get("ctx", {})
    if kind in _NO_OBJECT:
        return "it should be an object with named values"
    if kind in _WANTED:
        return f"{_shortened(fault['input'])} is not {_WANTED[kind]}"
    if kind in _LIMITS:
        key, words = _LIMITS[kind]
        limit = limits[key]
        return f"{_shortened(fault['input'])} is {words} {int(limit) if limit == int(limit) else limit}"
    if kind == "literal_error":
        return f"{_shortened(fault['input'])} is not {limits['expected']}"
    return _KEYS.get(kind, str(fault["msg"]).removeprefix("Value error, "))


def _shortened(value: object) -> str:
    shown = f"'{value[:_SHOWN]}'" if isinstance(value, str) else json.dumps(value, default=str)
    return shown if len(shown) <= _SHOWN + 2 else f"{shown[:_SHOWN]}..."
