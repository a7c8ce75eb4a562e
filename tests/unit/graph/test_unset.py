"""Calls that are traced as others that say the same: casts to the dtype of another tensor, and tensors without
contents."""

import torch
from torch import nn

from planner.graph.trace import trace


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.linear(x)
        whole = found.new_empty(*found.shape[:-1], 16)
        whole[..., :8] = found
        whole[..., 8:] = found.double().square().type_as(x)
        return whole.mean()


def test_what_is_not_set_yet_is_zeros_and_a_cast_reads_no_other_tensor() -> None:
    graph = trace(Filled(), (torch.ones(4, 8),))
    calls = [op.op for op in graph.operators]
    assert "aten.new_zeros.default" in calls
    assert not any("empty" in call or "type_as" in call for call in calls)
    (cast,) = (op for op in graph.operators if graph.types[str(op.results[0])].dtype == "float32" and "to" in op.op)
    assert len(cast.operands) == 1
