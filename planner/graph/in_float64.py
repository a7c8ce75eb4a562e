"""A model as if float32 were float64: what a model computes in float32 whatever its weights are, it computes in
float64.

    logits.float()                       logits.double()
    F.softmax(x, dim=-1, dtype=float32)  in float64

So a model that was written for training in fp32 has the same operators in float64, without casts to and fro, and none
of them rounds to 24 bits.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


class InFloat64(TorchFunctionMode):
    """While it is entered, every call that says float32 means float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        wide = torch.Tensor.double if func is torch.Tensor.float else func
        given, named = pytree.tree_map(_wide, (tuple(args), dict(kwargs or {})))
        return wide(*given, **named)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
