"""YAML, read and written as plain data: lists of numbers on one line, keys in the given order.

The events of a text are counted before any value is built. An alias counts as much as what it repeats. So nine lines
that repeat each other nine times are known to be half a million values in advance; the same holds for merge keys.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from hardware_profiles.foreign import ForeignTextError, Limits, check_values
from planner.export.description import ExportError
from planner.export.files.settings import Settings

LIMITS = Limits(size=2**19, values=2**16)
"""Limits of YAML files, whose parser is written in Python: some seconds at most."""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Writes lists on one line."""


_Dumper.add_representer(list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, True))


def yaml_text(content: Mapping[str, object]) -> str:
    """Nested keys as YAML."""
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


def block_yaml(content: Mapping[str, object]) -> str:
    """As `yaml_text`, with every item of a list on its own line."""
    text: str = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=200)
    return text


def settings_of(text: str) -> Settings:
    """The keys of a YAML file; nothing in it is executed. Raises ExportError if it cannot be read."""
    try:
        return Settings(parse_yaml(text), "YAML")
    except ForeignTextError as error:
        raise ExportError(str(error)) from error


def parse_yaml(text: str, limits: Limits = LIMITS) -> Any:
    """The value of a YAML text without tags, with unique keys; aliases count each time.

    Raises ForeignTextError if it is not valid or exceeds `limits`.
    """
    if len(text) > limits.size:
        raise ForeignTextError(f"{len(text)} characters are too many; at most {limits.size} for such a file")
    try:
        _check_events(yaml.parse(text, Loader=yaml.SafeLoader), limits)
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ForeignTextError(f"not a YAML file{'' if mark is None else _at(mark)}") from error
    except ForeignTextError:
        raise
    except ValueError as error:  # an impossible date, a number of thousands of digits
        raise ForeignTextError(f"not a YAML file: {error}") from error
    check_values(found, limits)
    return found


@dataclass(slots=True)
class _Node:
    """An open list or mapping: its number of values so far and, for a mapping, its keys."""

    anchor: str | None
    mapping: bool
    values: int = 1
    children: int = 0
    keys: set[str] = field(default_factory=set)


def _check_events(events: Iterable[Any], limits: Limits) -> None:
    """Raise ForeignTextError for a text that nests too deeply or grows too large, before any value is built."""
    open_nodes, sizes = [_Node(anchor=None, mapping=False)], dict[str, int]()
    for event in events:
        mark = event.start_mark
        if getattr(event, "tag", None) is not None and not _is_plain(event):
            raise ForeignTextError(f"the tag {event.tag}{_at(mark)} is not read; write plain values")
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append(_Node(anchor=event.anchor, mapping=isinstance(event, yaml.MappingStartEvent)))
            if len(open_nodes) > limits.depth + 1:
                raise ForeignTextError(f"nested too deeply{_at(mark)}: at most {limits.depth} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            done = open_nodes.pop()
            _add(open_nodes[-1], done.values, done.anchor, sizes)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ForeignTextError(f"*{event.anchor}{_at(mark)} stands inside what it names, or before it")
            _add(open_nodes[-1], sizes[event.anchor], None, sizes)
        elif isinstance(event, yaml.ScalarEvent):
            _check_key(open_nodes[-1], event)
            _add(open_nodes[-1], 1, event.anchor, sizes)
        if open_nodes[-1].values > limits.values:
            raise ForeignTextError(f"it has more than {limits.values} values{_at(mark)}, with what aliases repeat")


def _is_plain(event: Any) -> bool:
    """Whether a tag is the non-specific one, "!"."""
    return isinstance(event, yaml.ScalarEvent) and event.tag == "!"


def _check_key(node: _Node, event: Any) -> None:
    if not node.mapping or node.children % 2:
        return
    if event.value in node.keys:
        raise ForeignTextError(f"the key {event.value[:80]!r}{_at(event.start_mark)} stands twice; keep one of them")
    node.keys.add(event.value)


def _add(node: _Node, values: int, anchor: str | None, sizes: dict[str, int]) -> None:
    """Add a value to a list or a mapping, with everything in it."""
    node.values += values
    node.children += 1
    if anchor is not None:
        sizes[anchor] = values


def _at(mark: Any) -> str:
    return f" at line {mark.line + 1}"
