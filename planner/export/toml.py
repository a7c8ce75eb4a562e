"""Sections of plain values as TOML, in the order in which they are given."""

from collections.abc import Mapping


def toml_text(sections: Mapping[str, Mapping[str, object]]) -> str:
    """`[section]` and its keys; sections without keys are left out, a list of lists has a line for each."""
    import tomlkit

    return tomlkit.dumps(
        {name: {key: _laid_out(value) for key, value in keys.items()} for name, keys in sections.items() if keys}
    )


def _laid_out(value: object) -> object:
    from tomlkit import array

    if not isinstance(value, list) or not any(isinstance(item, list) for item in value):
        return value
    lines = array()
    lines.extend(value)
    return lines.multiline(True)
