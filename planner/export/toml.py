"""Sections of plain values as TOML, in the order in which they are given."""

import math
from collections.abc import Mapping

from planner.export.quoting import in_toml


def toml_text(sections: Mapping[str, Mapping[str, object]]) -> str:
    """`[section]` and its keys; sections without keys are left out."""
    parts = []
    for name, keys in sections.items():
        if keys:
            parts.append("\n".join([f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in keys.items())]))
    return "\n\n".join(parts) + "\n"


def toml_value(value: object) -> str:
    """A string, number, truth value, or lists of them; a list of lists has a line for each."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    if isinstance(value, tuple | list):
        items = [toml_value(item) for item in value]
        nested = any(isinstance(item, tuple | list) for item in value)
        return "[\n" + "".join(f"    {item},\n" for item in items) + "]" if nested else f"[{', '.join(items)}]"
    if isinstance(value, str):
        return in_toml(value)
    return repr(value)
