"""A file of settings with some of them changed: the user's own lines, comments and order, but for the values.

What has to change is found by writing both descriptions as the engine has them and comparing the settings. Each is
then put in its place in the file: the value of a key of TOML, YAML or JSON. What the file does not have yet is added
beside its like; what is to go goes with its line. Whoever calls this reads the file again: only what says what was
meant is written.

Scripts are not changed: what else a line does, and where else a variable is used, only a shell knows. Their changes are
listed.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardware_profiles.foreign import SETTINGS, parse_json, parse_toml
from planner.export.description import Description, ExportError
from planner.export.files.arguments import options_in
from planner.export.files.toml import changed_toml
from planner.export.target import Job, Target

Settings = Mapping[str, Any]
_SHELL = ("megatron", "mindspeed")
_ABSENT = object()


def edited(target: Target, text: str, before: Job, after: Description) -> str:
    """The text of a file for `before.description`, changed to say `after`. Raises ExportError where such files are not
    changed."""
    old, new = (_written(target, job) for job in (before, replace(before, description=after)))
    changes = {
        name: new.get(name, _ABSENT) for name in {**old, **new} if old.get(name, _ABSENT) != new.get(name, _ABSENT)
    }
    if target.name == "torchtitan" and not re.search(r"^def ", text, re.MULTILINE):
        return changed_toml(text, {path: None if value is _ABSENT else value for path, value in changes.items()})
    if target.name == "deepspeed":
        return _edited_json(text, changes)
    if target.name in ("mindformers", "accelerate") and not re.search(r"^base_model:", text, re.MULTILINE):
        return _edited_yaml(text, changes)
    words = ", ".join(f"{name} {'left out' if value is _ABSENT else value}" for name, value in sorted(changes.items()))
    raise ExportError(f"such files of {target.name} are not rewritten; the settings to change are {words:.400}")


def _written(target: Target, job: Job) -> dict[str, Any]:
    """The settings of a description as the engine has them, by name or path."""
    text = target.write(job)[target.main]
    if target.name == "nemo":
        return dict(re.findall(r"^recipe\.(\S+) = (.*)$", text, re.MULTILINE))
    if target.name == "megatron-bridge":
        return dict(re.findall(r"^cfg\.(\S+) = (.*)$", text, re.MULTILINE))
    if target.name in _SHELL:
        return {name: " ".join(values) for name, values in options_in(text).all}
    if target.main.endswith(".toml"):
        return _flat(parse_toml(text, replace(SETTINGS, finite=False)))
    if target.main.endswith(".json"):
        return _flat(parse_json(text))
    from planner.export.files.yaml_files import parse_yaml

    return _flat(parse_yaml(text))


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in content.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _edited_json(text: str, changes: Settings) -> str:
    content = parse_json(text, SETTINGS)
    for path, value in changes.items():
        *sections, key = path.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ExportError(f"{section} is no table of settings; change it by hand")
        if value is _ABSENT:
            place.pop(key, None)
        else:
            place[key] = value
    indent = re.search(r"\n([ \t]{1,8})\"", text)
    return json.dumps(content, indent=len(indent[1].expandtabs(4)) if indent else 2, ensure_ascii=False) + "\n"


def _edited_yaml(text: str, changes: Settings) -> str:
    lines = (text if text.endswith("\n") else f"{text}\n").splitlines(keepends=True)
    for path, value in sorted(changes.items()):
        *sections, key = path.split(".")
        first, last, indent = _block(lines, sections)
        written = "" if value is _ABSENT else json.dumps(value).strip('"')
        for at in range(first, last):
            head = f"{indent}{key}:"
            if lines[at].startswith(head):
                _, mark, comment = lines[at].rstrip("\n").partition("#")
                tail = f"  #{comment}" if mark else ""
                lines[at] = "" if value is _ABSENT else f"{head} {written}{tail}\n"
                break
        else:
            if value is not _ABSENT and last >= 0:
                lines.insert(last, f"{indent}{key}: {written}\n")
    return "".join(lines)


def _block(lines: list[str], sections: list[str]) -> tuple[int, int, str]:
    """The lines of a section, made at the end where there is none, and what its keys stand behind."""
    first, last, indent = 0, len(lines), ""
    for section in sections:
        at = next((n for n in range(first, last) if re.match(rf"{indent}{re.escape(section)}:", lines[n])), None)
        if at is None:
            lines.insert(last, f"{indent}{section}:\n")
            at, last = last, last + 1
        following = (
            n
            for n in range(at + 1, last)
            if re.match(rf"{indent}\S", lines[n]) and not lines[n].lstrip().startswith("#")
        )
        first, last = at + 1, next(following, last)
        inner = next((re.match(r"\s*", line) for line in lines[first:last] if line.strip()), None)
        indent = inner[0] if inner is not None and len(inner[0]) > len(indent) else indent + "  "
    return first, last, indent
