"""A linear layer whose parts are layers of their own (`taken_apart`); apart from what needs no PyTorch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from planner.models.huggingface.taken_apart import outputs_dim


class TakenApart(nn.Module):
    """A linear layer, or a `Conv1D` of transformers, whose parts are layers of their own: its outputs, joined."""

    def __init__(self, layer: Any, parts: Sequence[str], sizes: Sequence[int]) -> None:
        super().__init__()
        self.parts = tuple(parts)
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        for name, start, size in zip(parts, starts, sizes, strict=True):
            setattr(self, name, _part(layer, start, size))

    @property
    def layers(self) -> tuple[Any, ...]:
        """The parts, in order."""
        return tuple(getattr(self, name) for name in self.parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of all parts, joined along the last dim."""
        return torch.cat([layer(x) for layer in self.layers], dim=-1)


def _part(layer: Any, start: int, size: int) -> Any:
    """A layer with the outputs of another one from `start` on."""
    with torch.device("meta"):
        if isinstance(layer, nn.Linear):
            made: Any = nn.Linear(layer.in_features, size, layer.bias is not None)
        else:
            made = type(layer)(size, layer.weight.shape[0])
    for name, along in (("weight", outputs_dim(layer)), ("bias", 0)):
        whole = getattr(layer, name)
        if whole is not None:
            cut = whole.detach().narrow(along, start, size).clone(memory_format=torch.contiguous_format)
            setattr(made, name, nn.Parameter(cut, whole.requires_grad))
    return made.train(layer.training)
