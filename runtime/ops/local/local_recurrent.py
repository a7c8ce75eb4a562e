"""Recurrent layers on a piece of the batch.

On CPUs they use PyTorch's own steps, not oneDNN's kernel, which keeps twice as much for every step in a workspace whose
size cannot be predicted. Device libraries compute the gradients of inputs and initial states even if they are not
requested; the steps here do so too, so that one rule describes the work everywhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from planner.graph.torch_operators import resolve

if TYPE_CHECKING:
    from runtime.ops.shard import Shard


def recurrent(shard: "Shard", source: torch.Tensor, states: Any, weights: list[torch.Tensor], *rest: Any) -> Any:
    """The layer of this rank's samples: its result and last states."""
    layer = resolve(shard.bound.operator.op)
    if source.device.type != "cpu":
        return layer(source, states, weights, *rest)
    trained = next((weight for weight in weights if weight.requires_grad), None)
    if torch.is_grad_enabled() and trained is not None:
        source = _asked(source, trained)
        given = isinstance(states, list)
        states = [_asked(state, trained) for state in states] if given else _asked(states, trained)
    if source.dtype != torch.float32:  # oneDNN's layer kernel is float32 only; its products of other dtypes are fast
        return layer(source, states, weights, *rest)
    with _without_onednn():
        return layer(source, states, weights, *rest)


def _asked(tensor: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
    """The tensor, with its gradient computed in any case: where it is not requested, it is dropped."""
    if tensor.requires_grad:
        return tensor
    asked: torch.Tensor = _Asked.apply(tensor, trained)  # type: ignore[no-untyped-call]
    return asked


class _Asked(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        return None, None


@contextmanager
def _without_onednn() -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
