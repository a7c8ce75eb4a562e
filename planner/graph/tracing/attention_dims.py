"""Attention of any number of dims, as PyTorch takes it, called with four: batch, heads, sequence, head dim.

    n s d          n 1 s d            batch and heads in one dim, as SAM and UNets have it, or no heads
    s d            1 1 s d
    b c n s d      (b c) n s d        attention along one dim of an image, in windows

Rules, prices and local implementations know only attention with four dims.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_DIMS = 4
_MATRIX = 2


class AttentionOfFourDims(TorchFunctionMode):
    """While active, `scaled_dot_product_attention` of tensors with more or fewer dims is called with four."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return attention_of_four_dims(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attention_of_four_dims(
    attend: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """The result of `attend`, in the form of `scaled_dot_product_attention`, for tensors that get their four dims."""
    operands = (query, key, value)
    ranks = {operand.dim() for operand in operands}
    if ranks == {_DIMS} or min(ranks) < _MATRIX:  # PyTorch refuses the latter
        plain: torch.Tensor = attend(query, key, value, attn_mask, *args, **kwargs)
        return plain
    grouped = kwargs.get("enable_gqa", False)  # dims of heads, and the dims before them, stay as they are
    leading = query.shape[:-2]
    if not grouped:
        leading = torch.broadcast_shapes(*(each.shape[:-2] for each in operands))  # type: ignore[no-untyped-call]
        operands = tuple(each.expand(*leading, *each.shape[-2:]) for each in operands)  # type: ignore[assignment]
    heads_apart = grouped or len(leading) > 1
    made: torch.Tensor = attend(
        *(_of_four(operand, heads_apart) for operand in operands),
        _mask_of_four(attn_mask, leading, heads_apart),
        *args,
        **kwargs,
    )
    if len(leading) == _DIMS - 2:
        return made
    if len(leading) > _DIMS - 2:
        return made.view(*leading[:-1], *made.shape[1:])
    made = made.squeeze(0) if grouped else made.squeeze(1)
    return made if leading else made.squeeze(0)


def _of_four(tensor: torch.Tensor, heads_apart: bool) -> torch.Tensor:
    """A tensor with one dim of a batch and one of heads before its last two."""
    if tensor.dim() == _MATRIX:
        tensor = tensor.unsqueeze(0)
    if tensor.dim() < _DIMS:
        return tensor.unsqueeze(0) if heads_apart else tensor.unsqueeze(1)
    return tensor.flatten(0, -_DIMS)


def _mask_of_four(mask: torch.Tensor | None, leading: torch.Size, heads_apart: bool) -> torch.Tensor | None:
    """A mask that has as many samples as its operands, or one."""
    if mask is None or mask.dim() <= _MATRIX:
        return mask
    mask = mask[(None,) * (len(leading) - mask.dim() + _MATRIX)]
    batch = len(leading) - heads_apart
    if any(extent > 1 for extent in mask.shape[:batch]):
        mask = mask.expand(*leading[:batch], *mask.shape[batch:])
    return _of_four(mask, heads_apart)
