"""Finds the loss in what a module returns."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from planner.errors import ModelError

HOW = 'return the scalar loss, alone, first of a tuple, as `.loss`, or in a dict as "loss"'


def loss_in(result: Any) -> Any:
    """The loss in what a module returned: the object itself, the first of a tuple or list, `.loss`, or in a dict
    under "loss"; the returned object itself where none of these exists."""
    if isinstance(result, Mapping) and "loss" in result:
        return result["loss"]
    if hasattr(result, "loss"):
        return result.loss
    if isinstance(result, tuple | list) and result and not hasattr(result, "_fields"):
        return loss_in(result[0]) if not isinstance(result[0], tuple | list) else result[0]
    return result


def checked_loss(module: nn.Module, result: Any) -> torch.Tensor:
    """The scalar loss in what a module returned. Raises ModelError, naming its forward, where there is none."""
    loss = loss_in(result)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    place = f" (its forward: {forward_line(module)})"
    scalars = _scalars(result)
    if scalars:
        total = " + ".join(f"weight * {name}" for name in scalars)
        raise ModelError(
            f"{type(module).__name__} returned several losses, {', '.join(scalars)}{place}; training takes one:"
            f" return their weighted sum as well, {{'loss': {total}, ...}}"
        )
    hint = "; a loss of None mostly means that labels are missing among the inputs" if loss is None else ""
    shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"{type(loss).__name__}"
    raise ModelError(f"calling {type(module).__name__} on the example inputs returned {shape}; {HOW}{hint}{place}")


def _scalars(result: Any) -> list[str]:
    """Names of the scalars in a dict or a named tuple without a loss."""
    named: Any = result._asdict() if hasattr(result, "_asdict") else result
    if not isinstance(named, Mapping):
        return []
    return [str(name) for name, value in named.items() if isinstance(value, torch.Tensor) and value.numel() == 1]


def forward_line(module: nn.Module) -> str:
    """Where the forward of a module is defined, `file.py:12`."""
    code = inspect.unwrap(type(module).forward).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"
