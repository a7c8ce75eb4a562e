"""What would change gradients behind a plan's back is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from planner.errors import ModelError
from planner.graph.trace import trace
from planner.graph.tracing.on_meta import on_meta
from tests.refusals import refused


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


REFUSED: dict[str, tuple[Callable[[Net], Any], tuple[str, ...]]] = {
    "gradient": (lambda net: net.linear.weight.register_hook(lambda g: g * 2), ("linear.weight", "register_hook")),
    "accumulated": (lambda net: net.linear.bias.register_post_accumulate_grad_hook(lambda p: None), ("linear.bias",)),
    "module": (lambda net: net.linear.register_full_backward_hook(lambda *_: None), ("'linear'", "backward")),
    "before": (lambda net: net.register_full_backward_pre_hook(lambda *_: None), ("(root)", "backward")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hooks_of_the_backward_pass_are_refused(name: str) -> None:
    registered, facts = REFUSED[name]
    net = Net()
    handle = registered(net)
    for call in (on_meta, lambda given: trace(given, (torch.ones(2, 4),))):
        with refused(ModelError, *facts):
            call(net)
    handle.remove()
    assert trace(net, (torch.ones(2, 4),)).loss


def test_a_complex_parameter_is_refused() -> None:
    net = Net()
    net.turns = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    with refused(ModelError, "'turns'", "complex", "torch.view_as_complex"):
        trace(net, (torch.ones(2, 4),))
