"""The settings of torchtitan in a file of any origin, in the sections of version 0.2.

    0.0 and 0.1      batch_size, degrees and compile in [training] and [experimental]; float8 in a section of its own
    Primus           modules.pre_trainer.overrides of a YAML, over a model and defaults of its own

Sources: pytorch/torchtitan, torchtitan/config_manager.py at 258f6082, a99d2e5d, e846b694 and b291ad66; AMD-AGI/Primus,
primus/configs/modules/torchtitan, as of November 2026.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardware_profiles.foreign import SETTINGS, ForeignTextError, parse_toml
from planner.export.description import ExportError
from planner.export.files.toml import Path
from planner.export.files.yaml_files import parse_yaml
from planner.export.pytorch.torchtitan_writing import FP8, HEAD, MX

OLD_FP8 = "float8"
"""The converter of linear layers, and its section, in torchtitan 0.1; published files of 0.2 name it beside the section
of the later converter."""
_SWITCH = "enable_float8_linear"
_PAIR = 2
_SHARDS = "data_parallel_shard_degree"
SPLIT_POINTS = "pipeline_parallel_split_points"
_LIMITS = replace(SETTINGS, finite=False)  # a norm of infinity clips nothing
_PRIMUS = re.compile(r"^[ \t]+framework:\s*torchtitan\b", re.MULTILINE)
_DEFAULTS: dict[str, dict[str, Any]] = {
    "activation_checkpoint": {"mode": "none"},
    "compile": {"enable": True},
    "parallelism": {},
    "training": {"local_batch_size": 8, "seq_len": 2048},
}
"""Defaults of Primus."""


def content_of(text: str) -> tuple[dict[str, Any], list[str]]:
    """Sections with their keys, and notes on them. Raises ExportError."""
    try:
        if _PRIMUS.search(text):
            return _of_primus(parse_yaml(text))
        content = parse_toml(text, _LIMITS)
    except ForeignTextError as error:
        raise ExportError(str(error)) from error
    return _modern(content), []


def primus_model(text: str) -> str | None:
    """The name of the model in a file of Primus; None in another file."""
    if not _PRIMUS.search(text):
        return None
    named = re.search(
        r"^[ \t]+model:[ \t]*(?:\$\{\w+:)?([\w.-]+?)\}?(?:-fp8|-bf16)?\.yaml", text, re.MULTILINE | re.IGNORECASE
    )
    return "" if named is None else named[1]


def changes_in(content: Mapping[str, Any], changes: Mapping[Path, object]) -> dict[Path, object]:
    """Changes of keys of version 0.2 as changes of the keys that the version of a file has; None removes a key.

    Raises ExportError if the file's version cannot say them.
    """
    found: dict[Path, object] = {}
    for path, value in changes.items():
        if path == ("model", "converters"):
            at, value = _converters_in(content, value)
        elif _is_switched(content) and path[-1] in ("filter_fqns", "recipe_name"):
            if value not in (None, [HEAD]):  # that version always leaves the head out
                raise ExportError(f"{OLD_FP8}.{path[-1]}: this version of torchtitan has no such setting")
            continue
        else:
            at = _place_of(content, path)
        found[at] = value
    return found


def _place_of(content: Mapping[str, Any], path: Path) -> Path:
    """Where a file has a key of version 0.2. Raises ExportError if the file's version does not have it."""
    training, trial = (content.get(name) for name in ("training", "experimental"))
    if ".".join(path[:-1]) == FP8 and _has_old_fp8(content):
        return OLD_FP8, path[-1]
    if not isinstance(training, Mapping) or "batch_size" not in training or len(path) != _PAIR:
        return path
    section, key = path
    trial = trial if isinstance(trial, Mapping) else {}
    if path == ("training", "local_batch_size"):
        return "training", "batch_size"
    if section != "parallelism" or "parallelism" in content:
        return path
    key = "data_parallel_degree" if key == _SHARDS and "data_parallel_degree" in training else key
    for name, values in (("training", training), ("experimental", trial)):
        if key in values:
            return name, key
    if key in (_SHARDS, "data_parallel_replicate_degree", "tensor_parallel_degree"):
        return "training", key
    if key.startswith(("context_parallel", "pipeline_parallel_degree", "pipeline_parallel_schedule")) and trial:
        return "experimental", key
    raise ExportError(f"parallelism.{key}: this version of torchtitan has no such setting")


def _converters_in(content: Mapping[str, Any], wanted: object) -> tuple[Path, object]:
    """Where a file says which linear layers are in fp8, and its value there with the converters `wanted`; None removes
    the key. Converters of other things stay.

    Before torchtitan had converters (4cdc5926), `float8.enable_float8_linear` switched fp8 on. Raises ExportError for a
    converter that the file's version does not have.
    """
    ours = [str(name) for name in wanted] if isinstance(wanted, list) else []
    model, old = content.get("model"), _has_old_fp8(content)
    if old and MX in ours:
        raise ExportError(f"{MX}: this version of torchtitan has no such converter")
    if _is_switched(content):
        return (OLD_FP8, _SWITCH), bool(ours)
    given = model.get("converters") if isinstance(model, Mapping) else None
    words = [word.strip() for word in given.split(",")] if isinstance(given, str) else given or []
    if not isinstance(words, list):
        raise ExportError(f"model.converters: {given!s:.80}; write a list of names")
    known = {FP8, MX, OLD_FP8}
    first = next((at for at, word in enumerate(words) if word in known), len(words))
    others = [word for word in words[first:] if word not in known]
    found = [*words[:first], *(OLD_FP8 if old else name for name in ours), *others]
    return ("model", "converters"), found or None


def _is_switched(content: Mapping[str, Any]) -> bool:
    """Whether `float8.enable_float8_linear` switches fp8 on, as before there were converters."""
    section = content.get(OLD_FP8)
    return isinstance(section, Mapping) and _SWITCH in section


def _has_old_fp8(content: Mapping[str, Any]) -> bool:
    """Whether fp8 of linear layers has the section and the converter of version 0.1."""
    model = _modern(dict(content)).get("model")
    converters = model.get("converters") if isinstance(model, Mapping) else None
    known = converters if isinstance(converters, list) else []
    return isinstance(content.get(OLD_FP8), Mapping) and "quantize" not in content and not {FP8, MX} & {*known}


def _of_primus(content: Any) -> tuple[dict[str, Any], list[str]]:
    modules = content.get("modules") if isinstance(content, dict) else None
    parts = [part for part in (modules or {}).values() if isinstance(part, dict)]
    part = next((part for part in parts if part.get("framework") == "torchtitan"), None)
    if part is None:
        raise ExportError("modules: none of them is trained by torchtitan")
    given = part.get("overrides") or {}
    found = {name: dict(section) for name, section in _DEFAULTS.items()}
    for name, section in given.items():
        if isinstance(section, dict):
            found.setdefault(str(name), {}).update({key: value for key, value in section.items() if value is not None})
    model = str(part.get("model", "")).removesuffix(".yaml")
    if "fp8" in model.lower():
        found.setdefault("model", {})["converters"] = [FP8]
    return found, [f"{model}: the model is known by the name of this file, which was not read"]


def _modern(content: dict[str, Any]) -> dict[str, Any]:
    """The content with every key at its place in version 0.2."""
    found = {name: dict(section) if isinstance(section, dict) else section for name, section in content.items()}
    training, trial = (found.get(name) for name in ("training", "experimental"))
    degrees: dict[str, Any] = {}
    for section in (training, trial):
        if isinstance(section, dict):
            for key in [key for key in section if re.fullmatch(r"\w+_parallel_\w+", key)]:
                degrees[key] = section.pop(key)
    if not isinstance(training, dict):
        return found
    old = "batch_size" in training
    if old:
        training.setdefault("local_batch_size", training.pop("batch_size"))
    if "compile" in training:
        found.setdefault("compile", {"enable": training.pop("compile")})
    if "data_parallel_degree" in degrees:
        degrees["data_parallel_shard_degree"] = degrees.pop("data_parallel_degree")
    if degrees.pop("data_parallel_type", "fsdp") == "ddp":
        degrees["data_parallel_replicate_degree"] = degrees.pop("data_parallel_shard_degree", -1)
        degrees["data_parallel_shard_degree"] = 1
    if old:
        _pass_micro_batches(training, degrees)
    if degrees:
        found["parallelism"] = {**degrees, **found.get("parallelism", {})}
    _pass_fp8(found, training)
    return found


def _pass_micro_batches(training: dict[str, Any], degrees: dict[str, Any]) -> None:
    """Set the default number of micro-batches of a pipeline: the number of its ranks."""
    ranks, local = degrees.get("pipeline_parallel_degree", 1), training.get("local_batch_size")
    count = degrees.pop("pipeline_parallel_microbatches", None) or ranks
    if type(ranks) is int and ranks > 1 and type(local) is int and type(count) is int:
        if local % count:
            raise ExportError(f"training.batch_size: {local} does not divide into {count} micro-batches")
        degrees.setdefault("pipeline_parallel_microbatch_size", local // count)


def _pass_fp8(found: dict[str, Any], training: dict[str, Any]) -> None:
    section, model = found.get(OLD_FP8), found.get("model")
    on = isinstance(section, dict) and section.get(_SWITCH) is True
    on = on or training.get("fp8_linear") not in (None, "", False)
    if not isinstance(model, dict):
        return
    converters = model.get("converters")
    if isinstance(converters, str):
        model["converters"] = [word.strip() for word in converters.split(",") if word.strip()]
    elif on and converters is None:
        model["converters"] = [OLD_FP8]
