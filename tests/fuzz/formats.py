"""Texts of several formats as trees of plain values and back, with words that no tree can hold.

A word such as "@deep" in a tree stands for text that is pasted into the file as it is: 10,000 brackets, a number of
5,000 digits, a key that is there twice.
"""

import csv
import io
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

TWICE = "@twice of "
"""In front of a key: the dumped text has the key itself, which the mapping has as well."""

_DEPTH = 10_000
_PASTED: Mapping[str, str] = {
    "@deep": "[" * _DEPTH + "]" * _DEPTH,
    "@open": "[" * _DEPTH,
    "@maps": '{"a":' * _DEPTH + "1" + "}" * _DEPTH,
    "@digits": "9" * 5000,
    "@many": "9" * 400,
    "@1e400": "1e400",
    "@nan": "NaN",
    "@inf": "Infinity",
}
PASTED = tuple(_PASTED)
_OTHERWISE: Mapping[str, Mapping[str, str]] = {
    "toml": {"@nan": "nan", "@inf": "inf", "@maps": "{a=" * _DEPTH + "1" + "}" * _DEPTH},
    "yaml": {"@nan": ".nan", "@inf": ".inf", "@maps": "{a: " * _DEPTH + "1" + "}" * _DEPTH},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a text becomes a tree and a tree a text; `suffix` that of its files."""

    suffix: str
    load: Callable[[bytes], Any]
    dump: Callable[[Any], bytes]


def _pasted(text: str, format: str) -> bytes:
    words = {**_PASTED, **_OTHERWISE.get(format, {})}
    text = re.sub(r"""["']?(@[a-z0-9]+)\b["']?""", lambda found: words.get(found[1], found[0]), text)
    return text.replace(TWICE, "").encode("utf-8", "surrogatepass")


def _toml(value: Any) -> str:
    """A value on one line; tables are inline ones."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return '""' if value is None else json.dumps(value, default=str)


def _toml_text(tree: Any) -> bytes:
    if not isinstance(tree, dict):
        return _pasted(_toml(tree), "toml")
    return _pasted("".join(f"{json.dumps(str(key))} = {_toml(value)}\n" for key, value in tree.items()), "toml")


def _yaml_text(tree: Any) -> bytes:
    return _pasted(yaml.safe_dump(tree, sort_keys=False, allow_unicode=False, width=10**6), "yaml")


def _rows(content: bytes) -> Any:
    return list(csv.DictReader(io.StringIO(content.decode())))


def _csv_text(tree: Any) -> bytes:
    rows = tree if isinstance(tree, list) else [tree]
    found, columns = io.StringIO(), dict.fromkeys(key for row in rows if isinstance(row, dict) for key in row)
    writer = csv.writer(found, lineterminator="\n")
    writer.writerow([str(column).removeprefix(TWICE) for column in columns])
    for row in rows:
        writer.writerow([row.get(column, "") for column in columns] if isinstance(row, dict) else [row])
    return _pasted(found.getvalue(), "csv")


def _words(content: bytes) -> Any:
    return re.split(r"(?<=\s)", content.decode())


def _joined(tree: Any) -> bytes:
    return _pasted(" ".join(map(str, tree)) if isinstance(tree, list) else str(tree), "words")


def _header(content: bytes) -> Any:
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size])


def _tensors(tree: Any) -> bytes:
    header = JSON.dump(tree)
    return len(header).to_bytes(8, "little") + header + bytes(64)


def _latin(tree: Any) -> bytes:
    return "".join(map(str, tree if isinstance(tree, list) else [tree])).encode("latin-1", "replace")


JSON = Format(
    suffix=".json", load=json.loads, dump=lambda tree: _pasted(json.dumps(tree, indent=1, default=str), "json")
)
TOML = Format(suffix=".toml", load=lambda content: tomllib.loads(content.decode()), dump=_toml_text)
YAML = Format(suffix=".yaml", load=lambda content: yaml.safe_load(content), dump=_yaml_text)
CSV = Format(suffix=".csv", load=_rows, dump=_csv_text)
WORDS = Format(suffix=".txt", load=_words, dump=_joined)
TENSORS = Format(suffix=".safetensors", load=_header, dump=_tensors)
BYTES = Format(suffix=".bin", load=lambda content: list(content.decode("latin-1")), dump=_latin)
