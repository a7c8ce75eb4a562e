"""A module as it is traced: without values."""

import copy
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.graph.tracing.gradient_hooks import refuse_gradient_hooks


def on_meta(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters, buffers and other tensors are on the meta device; tied ones stay tied,
    nothing is copied.

    Strides, and with them which reshapes copy, differ between devices, but a graph must not; so it is traced on meta.
    Objects of a module that cannot be copied (a lock, an open file) are shared with the copy. Raises ModelError for
    hooks of the backward pass, which the copy would not have.
    """
    refuse_gradient_hooks(module)
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for tensor in (*module.buffers(), *_plain_tensors(module)):
        if id(tensor) not in memo:
            memo[id(tensor)] = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
    for part in module.modules():
        for value in _plain(part):
            if not _can_be_copied(value, memo):
                memo[id(value)] = value
    return copy.deepcopy(module, memo)


def without_data(module: nn.Module, *, on_host: bool = False) -> nn.Module:
    """The module itself where all of its parameters are on the meta device, and everything else is where it was built
    without data; else a copy that is all on meta."""
    return on_meta(module) if on_host or not all(one.is_meta for one in module.parameters()) else module


def _plain(module: nn.Module) -> list[Any]:
    """What a module keeps in attributes of its own, beside parameters, buffers, modules and hooks."""
    known = vars(nn.Module())
    return [value for name, value in vars(module).items() if name not in known]


def _plain_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Tensors that are plain attributes, or in lists, tuples and dicts of these."""
    leaves = (leaf for part in module.modules() for value in _plain(part) for leaf in pytree.tree_leaves(value))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _can_be_copied(value: Any, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))  # a failed copy leaves half a copy in the memo
    except (TypeError, RuntimeError, copy.Error):  # as pickle says it, PyTorch of tensors with a history, and copy
        return False
    return True
