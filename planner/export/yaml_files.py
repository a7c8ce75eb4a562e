"""YAML, read and written as plain data: lists of numbers on one line, keys in the order in which they are given."""

from collections.abc import Mapping
from typing import Any

import yaml

from planner.export.description import ExportError
from planner.export.settings import Settings


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Writes lists on one line."""


_Dumper.add_representer(list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, True))


def yaml_text(content: Mapping[str, object]) -> str:
    """Nested keys as YAML."""
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


def settings_of(text: str) -> Settings:
    """The keys of a YAML file; nothing in it is executed. Raises ExportError where it cannot be read."""
    try:
        content: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise ExportError(f"not a YAML file{where}") from error
    return Settings(content, "YAML")
