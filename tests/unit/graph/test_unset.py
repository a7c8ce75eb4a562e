"""Calls that are traced as others that say the same: casts to the dtype of another tensor, tensors without contents,
and tensors that are filled piece by piece."""

import pytest
import torch
from torch import nn

from planner.graph.trace import trace


class Filled(nn.Module):
    """Two pieces in a new tensor: the first at 0:8, the second from `start` to `stop`."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self.linear, self.place = nn.Linear(8, 8), slice(start, stop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.linear(x)
        whole = found.new_empty(*found.shape[:-1], 16)
        whole[..., self.place] = found.double().square().type_as(x)
        whole[..., :8] = found
        return whole.mean()


@pytest.mark.parametrize(("start", "stop"), [(6, 14), (7, 15), (8, 16), (-8, 16)])
def test_what_is_not_set_yet_is_zeros_and_a_cast_reads_no_other_tensor(start: int, stop: int) -> None:
    """Where pieces fill the tensor each place once, it is their join."""
    model, x = Filled(start, stop), torch.ones(4, 8)
    graph = trace(model, (x,))
    calls = [op.op for op in graph.operators]
    joined = stop == 16
    assert calls.count("aten.cat.default") == joined
    assert calls.count("aten.zeros.default") == (not joined)
    assert calls.count("aten.slice_scatter.default") == (0 if joined else 2)
    assert not any("empty" in call or "new_" in call or "type_as" in call for call in calls)
    (cast,) = (op for op in graph.operators if graph.types[str(op.results[0])].dtype == "float32" and "to" in op.op)
    assert len(cast.operands) == 1
    if joined:
        (join,) = (op for op in graph.operators if op.op == "aten.cat.default")
        assert join.operands == ("linear/linear", *cast.results)
