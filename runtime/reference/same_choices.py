"""Makes the unsharded module choose the same experts, and groups of them, as the traced graph under a plan.

    plan      topk of layer 1: experts 3 7        topk of layer 2 ...
    module    scores.topk(2) ─> 3 7, with the module's own scores

A router chooses the largest scores. Two runs that round differently choose differently where scores are close, and are
different functions from there on: in bf16 half of the tokens of a small DeepSeek-V3 get other experts in its last layer
than in fp32, and the gradients differ by as much as their own norm. So where arithmetic in 16 bits is compared, choices
are made equal; whether they are right is compared in fp32.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from planner.graph.operator_graph import OperatorGraph

_TOPK = "aten.topk.default"
_CALLS = frozenset({torch.topk, torch.Tensor.topk})


class _Chosen(NamedTuple):
    """The result type of torch's topk."""

    values: torch.Tensor
    indices: torch.Tensor


def choices_of(graph: OperatorGraph) -> tuple[str, ...]:
    """The values of a graph with the chosen numbers, for every choice whose numbers are read, in order; the name is
    empty for others."""
    chosen = (op.results[1] for op in graph.operators if op.op == _TOPK)
    return tuple(name if name is not None and name in graph.consumers else "" for name in chosen)


class SameChoices(TorchFunctionMode):
    """A context in which the calls of topk, in their order, choose the numbers in `chosen`, whole tensors; None leaves
    a call its own choice. Enter it for one forward pass."""

    def __init__(self, chosen: Sequence[torch.Tensor | None]) -> None:
        super().__init__()
        self._left = list(chosen)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        chosen = self._left.pop(0) if func in _CALLS and self._left else None
        if chosen is None:
            return func(*args, **kwargs)
        dim = kwargs.get("dim", args[2] if len(args) > 2 else -1)
        return _Chosen(torch.gather(args[0], dim, chosen), chosen)
