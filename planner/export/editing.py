"""A file of settings with some of them changed: the user's own lines, comments and order stay, only values change.

The changes are found by writing both descriptions in the engine's form and comparing the settings. Then the value of
each key is replaced in the TOML, YAML or JSON file. A new key is added beside similar ones; a removed key goes with its
line. The caller reads the file again, to make sure that it says what was meant.

In scripts and YAML files of options, the options themselves are changed (`option_editing.py`). Recipes in Python, and
arguments of a program that only transformers knows, are not changed: their changes are listed.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardware_profiles.foreign import SETTINGS, parse_json, parse_toml
from planner.export.description import Description, ExportError
from planner.export.files.arguments import options_in
from planner.export.files.option_editing import edited_keys, edited_options
from planner.export.files.toml import Path, changed_toml, flat
from planner.export.pytorch.torchtitan_content import changes_in, primus_model
from planner.export.pytorch.trainer_reading import is_trainers
from planner.export.target import Job, Target

Settings = Mapping[Path, Any]
_SHELL = ("megatron", "mindspeed")
_PADDING = ("make-vocab-size-divisible-by",)
_ARGUMENTS = ("per-device-train-batch-size", "gradient-accumulation-steps", "gradient-checkpointing")
_AXOLOTL = ("micro-batch-size", "gradient-accumulation-steps", "gradient-checkpointing")
"""Samples of a micro-batch, micro-batches, and whether blocks are recomputed."""
_SWITCHES = frozenset({
    "gradient-checkpointing", "recompute-activations", "moe-layer-recompute", "checkpoint-activations",
    "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split",
})  # fmt: skip
"""Options without a value that exporters do not write."""
_ABSENT = object()
_TOGETHER: tuple[tuple[str, ...], ...] = (
    (
        "recompute-granularity", "recompute-method", "recompute-num-layers", "recompute-modules",
        "recompute-activations", "moe-layer-recompute", "checkpoint-activations", "activations-checkpoint-method",
    ),
    (
        "pipeline-model-parallel-layout", "num-layers-per-virtual-pipeline-stage", "num-layer-list",
        "num-virtual-stages-per-pipeline-rank", "decoder-first-pipeline-num-layers", "pp-partition-method",
        "decoder-last-pipeline-num-layers", "account-for-embedding-in-pipeline-split",
        "account-for-loss-in-pipeline-split",
    ),
)  # fmt: skip
"""Options of Megatron-LM, and of older versions and software on it, of which several say one thing: where one of them
changes, all of them are written anew."""


def edited(target: Target, text: str, before: Job, after: Description) -> str:
    """The text of a file for `before.description`, changed to say `after`.

    Raises ExportError for files that are not changed.
    """
    old, new = (_written(target, job) for job in (before, replace(before, description=after)))
    changes = {
        name: new.get(name, _ABSENT) for name in {**old, **new} if old.get(name, _ABSENT) != new.get(name, _ABSENT)
    }
    if target.name == "torchtitan" and not re.search(r"^def ", text, re.MULTILINE) and primus_model(text) is None:
        content = parse_toml(text, replace(SETTINGS, finite=False))
        wanted = {path: None if value is _ABSENT else value for path, value in changes.items()}
        return changed_toml(text, changes_in(content, wanted))
    if target.name == "deepspeed" and not is_trainers(text):
        return _edited_json(text, changes)
    own = not re.search(r"^base_model:", text, re.MULTILINE) and not is_trainers(text)
    if target.name in ("mindformers", "accelerate") and own and text.lstrip().startswith("{"):
        return _edited_json(text, _without_empty_sections(changes, new))
    if target.name in ("mindformers", "accelerate") and own:
        return _edited_yaml(text, _without_empty_sections(changes, new))
    if target.name in _SHELL:
        options = {
            name: None if value is _ABSENT else str(value)
            for (name,), value in changes.items()
            if name not in _PADDING  # the vocabulary of the file is padded as it was
        }
        for names in _TOGETHER:
            if not options.keys().isdisjoint(names):
                options |= {name: None if (value := new.get((name,))) is None else str(value) for name in names}
        keys = re.search(r"^MODEL_ARGS:|^modules:|^system:", text, re.MULTILINE) is not None
        switches = {name for (name,), value in {**old, **new}.items() if value == ""} | _SWITCHES
        return edited_keys(text, options) if keys else edited_options(text, options, switches)
    of_program = _of_program(text, before.description, after)
    if of_program is not None:
        keys = re.search(r"^[\"']?[a-z_]+[\"']?:", text, re.MULTILINE) is not None
        return edited_keys(text, of_program) if keys else edited_options(text, of_program, _SWITCHES)
    words = ", ".join(
        f"{'.'.join(path)} {'left out' if value is _ABSENT else value}" for path, value in sorted(changes.items())
    )
    raise ExportError(f"such files of {target.name} are not rewritten; the settings to change are {words:.400}")


def _of_program(text: str, before: Description, after: Description) -> dict[str, str | None] | None:
    """Changes to the arguments of a transformers program, or to axolotl's file.

    None for another file, and if anything but batches and recomputation changes.
    """
    names = _ARGUMENTS if is_trainers(text) else _AXOLOTL if re.search(r"^base_model:", text, re.MULTILINE) else None
    kept = replace(
        after, micro_batch=before.micro_batch, micro_batches=before.micro_batches, full=before.full,
        selective=before.selective, kept=before.kept,
    )  # fmt: skip
    if names is None or kept != before or any(after.selective):
        return None
    found: dict[str, str | None] = {}
    for name, was, now in zip(
        names,
        (before.micro_batch, before.micro_batches, any(before.full)),
        (after.micro_batch, after.micro_batches, any(after.full)),
        strict=True,
    ):
        if was != now:
            found[name] = str(now).lower()
    return found


def _without_empty_sections(changes: Settings, new: Settings) -> dict[Path, Any]:
    """The changes, with a nested section removed as a whole if it has nothing left."""
    kept = {path[:depth] for path in new for depth in range(1, len(path) + 1)}
    found: dict[Path, Any] = {}
    for path, value in changes.items():
        shown = next((path[:depth] for depth in range(2, len(path)) if path[:depth] not in kept), path)
        found[shown if value is _ABSENT else path] = value
    return found


def _written(target: Target, job: Job) -> dict[Path, Any]:
    """The settings of a description in the engine's form, by name or path."""
    text = target.write(job)[target.main]
    if target.name == "nemo":
        return {(name,): value for name, value in re.findall(r"^recipe\.(\S+) = (.*)$", text, re.MULTILINE)}
    if target.name == "megatron-bridge":
        return {(name,): value for name, value in re.findall(r"^cfg\.(\S+) = (.*)$", text, re.MULTILINE)}
    if target.name in _SHELL:
        return {(name,): " ".join(values) for name, values in options_in(text).all}
    if target.main.endswith(".toml"):
        return flat(parse_toml(text, replace(SETTINGS, finite=False)))
    if target.main.endswith(".json"):
        return flat(parse_json(text))
    from planner.export.files.yaml_files import parse_yaml

    return flat(parse_yaml(text))


def _edited_json(text: str, changes: Settings) -> str:
    content = parse_json(text, SETTINGS)
    for path, value in changes.items():
        *sections, key = path
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
    """A YAML text with other values. Raises ExportError where anything else would change with them, as in a section in
    braces, or in one that an alias repeats."""
    from planner.export.files.yaml_files import parse_yaml

    written = _with_lines(text, changes)
    found, wanted = (
        {path: value for path, value in flat(parse_yaml(one)).items() if value is not None} for one in (written, text)
    )
    gone = [path for path, value in changes.items() if value is _ABSENT]
    wanted = {path: value for path, value in wanted.items() if not any(path[: len(one)] == one for one in gone)}
    wanted |= {path: value for path, value in changes.items() if value is not _ABSENT}
    if found != wanted:
        names = ", ".join(sorted(".".join(map(str, path)) for path in changes))
        raise ExportError(f"{names:.400}: cannot be changed where they stand in this file; change them by hand")
    return written


def _with_lines(text: str, changes: Settings) -> str:
    lines = (text if text.endswith("\n") else f"{text}\n").splitlines(keepends=True)
    for path, value in sorted(changes.items()):
        *sections, key = path
        place = _block(lines, sections, make=value is not _ABSENT)
        if place is None:
            continue
        first, last, indent = place
        written = "" if value is _ABSENT else json.dumps(value).strip('"')
        at = _line_of(lines, key, first, last, indent)
        if at is not None and _says(lines[at], value):
            continue
        if at is not None:
            _, mark, comment = lines[at].rstrip("\n").partition("#")
            tail = f"  #{comment}" if mark else ""
            end = _end_of(lines, at, last, indent)
            lines[at:end] = [] if value is _ABSENT else [f"{indent}{_quoted(key)}: {written}{tail}\n"]
        elif value is not _ABSENT:
            lines.insert(last, f"{indent}{_quoted(key)}: {written}\n")
    return "".join(lines)


def _says(line: str, value: Any) -> bool:
    """Whether a line already gives its key this value, maybe in another spelling: `True` for true."""
    written = line.partition("#")[0].partition(":")[2].strip()
    return isinstance(value, bool) and written.lower() == json.dumps(value)


def _quoted(key: str) -> str:
    """A key in YAML form."""
    return key if re.fullmatch(r"[\w-]+", key) else "'" + key.replace("'", "''") + "'"


def _line_of(lines: list[str], key: str, first: int, last: int, indent: str) -> int | None:
    """The line of a key of a section, quoted or not; None if it is absent."""
    head = re.compile(rf"{indent}(['\"]?){re.escape(key)}\1[ \t]*:")
    return next((at for at in range(first, last) if head.match(lines[at])), None)


def _end_of(lines: list[str], at: int, last: int, indent: str) -> int:
    """The line after a key and everything below it. A list may have the same indentation as its key."""
    end = at + 1
    for n in range(at + 1, last):
        inside = re.match(rf"{indent}([ \t]+[^ \t\n#]|- )", lines[n])
        if inside is None and lines[n].strip() and not lines[n].lstrip().startswith("#"):
            break
        if inside is not None:
            end = n + 1
    return end


def _block(lines: list[str], sections: list[str], make: bool) -> tuple[int, int, str] | None:
    """The lines of a section, and the indentation of its keys. A missing section is added at the end if `make`, else
    None."""
    first, last, indent = 0, len(lines), ""
    for section in sections:
        at = _line_of(lines, section, first, last, indent)
        if at is None:
            if not make:
                return None
            lines.insert(last, f"{indent}{_quoted(section)}:\n")
            at, last = last, last + 1
        elif make:  # the section replaces a plain value
            lines[at] = re.sub(r"^([^:#]*:)[ \t]*[^\s#&][^#\n]*?([ \t]*(?:#.*)?\n)$", r"\1\2", lines[at])
        first, last = at + 1, _end_of(lines, at, last, indent)
        inner = next((re.match(r"\s*", line) for line in lines[first:last] if line.strip() and line[0] != "#"), None)
        indent = inner[0] if inner is not None and len(inner[0]) > len(indent) else indent + "  "
    return first, last, indent
