"""The example that a model is traced with, with another number of samples."""

from typing import Any

import torch
from torch.utils import _pytree as pytree


def with_samples(arguments: Any, batch: int, count: int) -> Any:
    """`arguments` with `count` samples: the first ones of tensors whose leading dim is `batch`, or tensors without
    values where these have fewer."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.shape[:1] != (batch,):
            return leaf
        return leaf[:count] if batch >= count else leaf.new_empty((count, *leaf.shape[1:]))

    return pytree.tree_map(cut, arguments)


def samples_of(arguments: Any) -> int:
    """The samples of an example: the first dim of its first tensor that has one; 1 where none has."""
    leaves = (leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
    return next((int(leaf.shape[0]) for leaf in leaves if leaf.dim()), 1)
