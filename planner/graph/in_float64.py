"""A model as if float32 were float64: computations in float32, whatever the dtype of the weights, become computations
in float64.

    logits.float()                       logits.double()
    F.softmax(x, dim=-1, dtype=float32)  in float64
    torch.zeros(rows, width)             of float64

So a model that was written for training in fp32 has the same operators in float64, without casts back and forth, and no
operator rounds to 24 bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


class InFloat64(TorchFunctionMode):
    """While active, every call that says float32, or no dtype, means float64."""

    def __enter__(self) -> Self:
        self._default = float64_by_default()
        self._default.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._default.__exit__(*error)

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


@contextmanager
def float64_by_default() -> Iterator[None]:
    """While active, float64 is the default dtype. A graph that was traced in float64 needs that where it runs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
