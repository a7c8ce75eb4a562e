"""Another library's state in a checkpoint (beside weights and optimizer states), as JSON that runs no code when it is
read: numbers, text, lists, tuples, mappings and small tensors.

    (1, {"rate": inf})    ──▶    {"tuple": [1, {"dict": [["rate", {"float": "inf"}]]}]}

JSON objects stand only for types that JSON lacks, with one key that names the type, so reading is unambiguous.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hardware_profiles.foreign import ForeignTextError, parse_json
from planner.errors import CheckpointError

MOST_ELEMENTS = 1 << 20
"""Largest size of a tensor: larger ones are weights, which have their own files."""

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)}


def as_text(value: Any, file: Path) -> str:
    """The content of the file. Raises CheckpointError, naming the place, for anything but a plain value. Every rank
    calls it before any of them saves."""
    return json.dumps(_written(value, str(file)), allow_nan=False)


def values_of(text: str, file: Path) -> Any:
    """The value of a text that was read from the file. Raises CheckpointError for a text that `as_text` has not
    made."""
    try:
        return _read(parse_json(text))
    except (ForeignTextError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{file}: is not what training under a plan saved ({' '.join(str(error).split())[:200]}); name a checkpoint"
            " that it saved"
        ) from error


def _written(value: Any, place: str) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        items = [_written(item, f"{place}[{number}]") for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        return {"dict": [[_written(key, place), _written(item, f"{place}[{key!r}]")] for key, item in value.items()]}
    if isinstance(value, torch.Tensor) and str(value.dtype) in _DTYPES and value.numel() <= MOST_ELEMENTS:
        numbers = [_written(number, place) for number in value.detach().cpu().flatten().tolist()]
        return {"tensor": [str(value.dtype), list(value.shape), numbers]}
    raise CheckpointError(
        f"{place}: a {type(value).__name__} cannot be saved with a plan, which takes numbers, text, lists, mappings and"
        " small tensors; keep it elsewhere"
    )


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "float":
        return float(content)
    if kind == "tuple":
        return tuple(_read(item) for item in content)
    if kind == "dict":
        return {_read(key): _read(item) for key, item in content}
    if kind != "tensor":
        raise ValueError(f"unknown kind '{str(kind)[:40]}'")
    dtype, shape, numbers = content
    return torch.tensor(_read(numbers), dtype=_DTYPES[dtype]).reshape(shape)
