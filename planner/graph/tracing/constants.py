"""Tensors that a model reads and that are neither parameters nor registered buffers: attributes, and literals of its
code (`torch.tensor([0, 2])`), whose values are known from tracing."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from planner.errors import ModelError


def held_tensor(module: nn.Module, name: str, constants: Mapping[str, Any]) -> torch.Tensor:
    """The buffer of a graph with this name: of the module, or else one of the `constants` of its code.

    Raises ModelError where neither has it, or the constant has no values.
    """
    value: Any = dict(module.named_buffers(remove_duplicate=False)).get(name)
    if value is None:  # a plain attribute that is a tensor
        value = module
        for part in name.split("."):
            value = getattr(value, part, None)
    found = value if isinstance(value, torch.Tensor) else constants.get(name)
    if not isinstance(found, torch.Tensor) or (found is not value and found.is_meta):
        raise ModelError(
            f"{type(module).__name__} makes the constant tensor '{name}' in its forward pass, on the device of its"
            " input; register it as a buffer, so that it can be found"
        )
    return found.detach()
