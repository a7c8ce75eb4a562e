"""Sections of plain values as TOML, in the given order."""

from collections.abc import Mapping, MutableMapping
from typing import Any

from planner.export.description import ExportError

Path = tuple[str, ...]


def toml_text(sections: Mapping[str, Mapping[str, object]]) -> str:
    """`[section]` and its keys; sections without keys are left out, and a list of lists has one line per item."""
    import tomlkit

    return tomlkit.dumps(
        {name: {key: _laid_out(value) for key, value in keys.items()} for name, keys in sections.items() if keys}
    )


def changed_toml(text: str, changes: Mapping[Path, object]) -> str:
    """A TOML text with other values of some keys by path; comments stay, and None removes a key.

    A key is changed where it stands: in a section, behind dots or in braces. A new section has a header, or braces
    where a header cannot stand. Raises ExportError if the changes do not fit into the text.
    """
    import tomlkit

    wanted = {**flat(tomlkit.parse(text).unwrap()), **changes}
    wanted = {path: value for path, value in wanted.items() if value is not None}
    for braces in (False, True):
        document = tomlkit.parse(text)
        for path, value in sorted(changes.items(), key=lambda change: change[0]):
            _change(document, path, value, braces=braces)
        written = tomlkit.dumps(document)
        if flat(tomlkit.parse(written).unwrap()) == wanted:
            return written
    names = ", ".join(".".join(path) for path in sorted(changes))
    raise ExportError(f"{names:.400}: cannot be changed where they stand in this file; change them by hand")


def flat(content: Mapping[str, Any], above: Path = ()) -> dict[Path, Any]:
    """The values of nested sections by their paths."""
    found: dict[Path, Any] = {}
    for key, value in content.items():
        found |= flat(value, (*above, key)) if isinstance(value, Mapping) else {(*above, key): value}
    return found


def _change(document: MutableMapping[str, Any], path: Path, value: object, *, braces: bool) -> None:
    from tomlkit import inline_table, items, table

    *sections, key = path
    place = document
    for depth, section in enumerate(sections, 1):
        if section not in place and value is None:
            return
        if section not in place:
            inline = braces or isinstance(place, items.InlineTable)
            place[section] = inline_table() if inline else table(is_super_table=depth < len(sections))
        place = place[section]
        if not isinstance(place, MutableMapping):
            raise ExportError(f"{'.'.join(sections[:depth])} is no table of settings; change it by hand")
    if value is not None:
        place[key] = value
    elif key in place:
        del place[key]


def _laid_out(value: object) -> object:
    from tomlkit import array

    if not isinstance(value, list) or not any(isinstance(item, list) for item in value):
        return value
    lines = array()
    lines.extend(value)
    return lines.multiline(True)
