"""What is left out of an export changes neither the graph, nor the lines that it names."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import planner.graph.trace
from planner.errors import ModelError
from planner.graph.trace import trace


def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


class Block(nn.Module):
    """Calls a function, and changes a copy in place: so the graph is made functional after the export."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = halved(self.linear(x))
        made.add_(1)
        return made


class Model(nn.Module):
    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.blocks, self.draws = nn.ModuleList([Block(), Block()]), draws

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x + torch.randn_like(x) if self.draws else x).sum()


X = (torch.empty(4, 4, device="meta"),)


def test_the_graph_is_the_same_and_has_the_innermost_lines_of_forward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = trace(Model(draws=False), X)
    monkeypatch.setattr(planner.graph.trace, "quick_export", nullcontext)
    assert quick == trace(Model(draws=False), X)
    call, add = (f"test_quick_export.py:{Block.forward.__code__.co_firstlineno + at}" for at in (1, 2))
    total = f"test_quick_export.py:{Model.forward.__code__.co_firstlineno + 3}"
    block = [("aten.linear.default", call), ("aten.div.Tensor", call), ("aten.add.Tensor", add)]
    lines = [(op.op, op.line.rpartition("/")[2]) for op in quick.operators]
    assert lines == [*block, *block, ("aten.sum.default", total)]


def test_refusals_have_them() -> None:
    line = Model.forward.__code__.co_firstlineno + 3
    with pytest.raises(ModelError, match=f"test_quick_export.py:{line}"):
        trace(Model(draws=True), X)
