"""Modules without values: whatever else they keep."""

import threading
import warnings

import pytest
import torch
from torch import nn

from planner.graph.tracing.on_meta import on_meta


class Odd(nn.Module):
    """Keeps a lock, a constant, a list of constants, a weight that is also in a list, and a tensor with a history."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.linear.weight
        self.lock = threading.Lock()
        self.scale = torch.rand(4)
        self.scales = [torch.rand(4)]
        self.held = [self.linear.weight]
        self.twice = self.linear.weight * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.linear(x * self.scale * self.scales[0])).sum()


def test_every_tensor_is_on_meta_and_the_module_is_left_alone() -> None:
    odd = Odd()
    copied = on_meta(odd)
    assert copied(torch.empty(2, 4, device="meta")).is_meta
    assert copied.twice.is_meta
    assert copied.held[0] is copied.linear.weight is copied.tied.weight
    assert copied.lock is odd.lock
    assert not any(tensor.is_meta for tensor in (odd.linear.weight, odd.scale, odd.scales[0], odd.twice))


def test_a_hook_that_computes_the_weight_before_each_call() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        module = torch.nn.utils.weight_norm(nn.Linear(4, 4))  # keeps the weight as an attribute with a history
    assert on_meta(module)(torch.empty(2, 4, device="meta")).is_meta


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_recurrent_layers_keep_their_weights_in_a_list_of_references(kind: type[nn.RNNBase]) -> None:
    assert on_meta(kind(4, 4))(torch.empty(2, 3, 4, device="meta"))[0].is_meta
