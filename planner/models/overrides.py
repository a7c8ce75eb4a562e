"""Models that differ from a known one in some dimensions: `llama8b+num_layers=40+rope_theta=10000`.

The changes are part of a model's name. So anyone who has the name, above all a plan file, can build the model again.
Sizes of several numbers are written with an x between them, as in `resnet50+blocks=3x4x23x3`.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from planner.errors import ModelError, unknown_name

_REFERENCE = re.compile(r"(?P<name>.*?)(?P<changes>(\+\w+=[^+=]+)*)", re.DOTALL)
_VALUE = re.compile(r"[\w.:/@, -]+")
"""Characters of a value: names become part of files in many languages, so no quotes of any of these."""

_REPEATED = ("num_layers", "blocks", "predicted_tokens")
_MOST = 1024
"""Most modules that a dimension repeats: a name in a file must not build for hours."""
_POSITIVE = ("num_layers", "hidden_size", "num_heads", "vocab_size", "sequence_length")
"""Dimensions that no model has without one; others are 0 where a part of the model is absent."""
_FLOAT = r"-?[0-9]+(\.[0-9]*)?(e[-+]?[0-9]{1,3})?"
_WORDS = {"yes": True, "true": True, "no": False, "false": False}
_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "yes or no",
    str: "a word",
    tuple: "whole numbers, as in 3x4x6",
}


def split_reference(reference: str) -> tuple[str, Mapping[str, str]]:
    """The name of a model and its changes, as text. Raises ModelError where a key stands twice."""
    found = _REFERENCE.fullmatch(reference)
    assert found is not None, "a name may be anything"
    texts = found["changes"].split("+")[1:]
    changes = parse_changes(texts)
    if len(changes) < len(texts):
        keys = [text.partition("=")[0] for text in texts]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ModelError(f"{reference:.80}: {twice} stands {keys.count(twice)} times; keep one of them")
    return found["name"], changes


def canonical_reference(reference: str) -> str:
    """A reference in canonical form: changes in the order of their keys, numbers that belong together with an x."""
    return changed_reference(reference, ())


def looks_like_config(reference: str) -> bool:
    """Whether a reference has the form of a path to a config; no file is looked up."""
    name, _ = split_reference(reference)
    return ":" not in name and (name.endswith(".json") or "/" in name)


def changed_reference(reference: str, changes: Sequence[str]) -> str:
    """The name of a model with KEY=VALUE changes applied to the named one; the last value of a key counts."""
    name, before = split_reference(reference)
    return "+".join([name, *(f"{key}={value}" for key, value in sorted({**before, **parse_changes(changes)}.items()))])


def parse_changes(texts: Sequence[str]) -> dict[str, str]:
    """The KEY=VALUE texts; the last value of a key counts; numbers that belong together get an x between them.

    Raises ModelError for anything else.
    """
    found = {}
    for text in texts:
        key, _, value = (part.strip() for part in text.partition("="))
        if not re.fullmatch(r"\w+", key) or not re.fullmatch(r"[^+=]+", value):
            raise ModelError(f"--set '{text}': write KEY=VALUE, as in num_layers=40, without further = and +")
        if not _VALUE.fullmatch(value):
            strange = next(c for c in value if not _VALUE.fullmatch(c))
            raise ModelError(f"--set '{text:.80}': {strange!a} is in no value; write letters, digits, . : / @ - ,")
        found[key] = re.sub(r"(?<=[0-9])\s*,\s*(?=[0-9])", "x", value)
    return found


def typed_changes(changes: Mapping[str, str], config: type, name: str) -> dict[str, Any]:
    """Values of the fields of a dataclass, in the types of its annotations, for the model `name`.

    Raises ModelError for a key that is no field, naming the nearest field, and for a value of another type.
    """
    hints = typing.get_type_hints(config)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(config)}
    found = {key: _value(key, text, _known(key, fields, name), name) for key, text in changes.items()}
    for key, value in found.items():
        least = 1 if key in _POSITIVE else 0
        numbers = value if isinstance(value, tuple) else (value,)
        if any(number < least for number in numbers if isinstance(number, int | float)):
            raise ModelError(f"--set {key}={changes[key]}: {key} of {name} is {least} or more")
    for key in _REPEATED:
        counts = found.get(key, 0)
        if (sum(counts) if isinstance(counts, tuple) else counts) > _MOST:
            raise ModelError(f"--set {key}={changes[key]}: {key} of {name} is {_MOST:,} at most")
    return found


def changed_content(changes: Mapping[str, str], content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Values for the keys of a config file, each in the type of its current value; errors as above."""
    found = {}
    for key, text in changes.items():
        before = _known(key, content, name)
        value = _looks_like(text) if before is None else _value(key, text, type(before), name)
        found[key] = list(value) if isinstance(before, list) else value
    return found


def _known(key: str, known: Mapping[str, Any], name: str) -> Any:
    if key not in known:
        raise ModelError(f"--set {key}: {unknown_name(f'dimension of {name}', key, known)}")
    return known[key]


def _value(key: str, text: str, annotation: Any, name: str) -> Any:
    """Text as a value of an annotated type: of one of several types, or one of several values."""
    values = typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()
    kinds = [type(value) for value in values[:1]] or _kinds(annotation)
    found = next((value for kind in kinds if (value := _parsed(text, kind)) is not None), None)
    if found is None or (values and found not in values):
        wanted = " or ".join(map(str, values) if values else (_KINDS.get(kind, kind.__name__) for kind in kinds))
        raise ModelError(f"--set {key}={text}: {key} of {name} is {wanted}")
    return found


def _kinds(annotation: Any) -> list[type]:
    """The plain types of an annotation; lists are read as tuples are."""
    parts = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    plain = [typing.get_origin(part) or part for part in parts if part is not types.NoneType]
    return [tuple if kind is list else kind for kind in plain]


def _parsed(text: str, kind: type) -> Any:
    """The value of a text; None where it has another form."""
    if kind is bool:
        return _WORDS.get(text.lower())
    if kind is tuple:
        return tuple(map(int, text.split("x"))) if re.fullmatch(r"[0-9]{1,12}(x[0-9]{1,12})*", text) else None
    if kind is int:
        return int(text) if re.fullmatch(r"-?[0-9]{1,12}", text) else None
    if kind is float:
        return float(text) if re.fullmatch(_FLOAT, text.lower()) else None
    return text if kind is str else None


def parsed_number(text: str, kind: type[int] | type[float]) -> Any:
    """A number in a name; None where the text is none."""
    return _parsed(text, kind)


def _looks_like(text: str) -> Any:
    """A value for a key that has none yet, typed by its form."""
    found = (_parsed(text, kind) for kind in (bool, int, float))
    return next((value for value in found if value is not None), text)
