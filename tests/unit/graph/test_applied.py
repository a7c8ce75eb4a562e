"""Operators of a graph applied to tensors without memory: devices that are given by position."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from planner.errors import ModelError
from planner.graph.applied import check_applied
from planner.graph.trace import trace

TO_DEVICE = "aten.to.device"


class Moved(nn.Module):
    """Code that moves a tensor to the device of another, as the rotary embeddings of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(4).to(x.device, torch.float32)
        loss: torch.Tensor = (self.layer(x) * places).sum()
        return loss


def test_a_device_by_position_is_none_that_takes_memory() -> None:
    graph = trace(Moved(), (torch.zeros(2, 4),))
    moves = [op for op in graph.operators if op.op == TO_DEVICE]
    assert moves
    check_applied(graph, frozenset({TO_DEVICE}))
    others = (replace(op, arguments=(op.arguments[0], "cpu", *op.arguments[2:])) for op in moves)
    changed = dict(zip((op.name for op in moves), others, strict=True))
    with pytest.raises(ModelError, match="in place of a device"):
        check_applied(
            replace(graph, operators=tuple(changed.get(op.name, op) for op in graph.operators)), frozenset({TO_DEVICE})
        )
