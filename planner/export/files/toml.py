"""Sections of plain values as TOML, in the given order."""

from collections.abc import Mapping


def toml_text(sections: Mapping[str, Mapping[str, object]]) -> str:
    """`[section]` and its keys; sections without keys are left out, and a list of lists has one line per item."""
    import tomlkit

    return tomlkit.dumps(
        {name: {key: _laid_out(value) for key, value in keys.items()} for name, keys in sections.items() if keys}
    )


def changed_toml(text: str, changes: Mapping[str, object]) -> str:
    """A TOML text with other values of some keys by path; comments stay, and None removes a key."""
    import tomlkit

    document = tomlkit.parse(text)
    for path, value in sorted(changes.items(), key=lambda change: change[0]):
        section, _, key = path.partition(".")
        if section not in document:
            document[section] = {}
        table: dict[str, object] = document[section]
        if value is not None:
            table[key] = value
        elif key in table:
            del table[key]
    return tomlkit.dumps(document)


def _laid_out(value: object) -> object:
    from tomlkit import array

    if not isinstance(value, list) or not any(isinstance(item, list) for item in value):
        return value
    lines = array()
    lines.extend(value)
    return lines.multiline(True)
