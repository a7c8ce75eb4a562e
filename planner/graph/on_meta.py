"""A module as it is traced: without values."""

import copy
from typing import Any

import torch
from torch import nn


def on_meta(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters and buffers are on the meta device; tied ones stay tied, nothing is copied.

    Strides, and with them which reshapes copy, differ between devices; a graph must not, so it is traced there.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)
