"""Gradients are clipped as PyTorch clips them, and left alone where they are short, by one call for all of a dtype."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.update.norms import clip


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("most", [0.5, 1e6])
def test_gradients_are_clipped_together_as_torch_clips_them(most: float) -> None:
    torch.manual_seed(0)
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.bfloat16, torch.float32]
    weights = [nn.Parameter(torch.zeros(3 + at, 4, dtype=dtype)) for at, dtype in enumerate(dtypes)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    gradients = {str(at): weight.grad.clone() for at, weight in enumerate(weights)}
    norm = nn.utils.clip_grad_norm_(weights, most, foreach=False)
    with Counting() as counting:
        clip(gradients, norm, most)
    assert counting.calls["aten._foreach_mul_.Tensor"] == 3
    assert not counting.calls["aten.mul_.Tensor"]
    for at, weight in enumerate(weights):
        torch.testing.assert_close(gradients[str(at)], weight.grad, rtol=1e-2 if at in (1, 4) else 1e-6, atol=1e-7)


@pytest.mark.parametrize("most", [0.5, 20.0])
def test_clipped_gradients_are_those_of_pytorch(most: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3, 4)), torch.nn.Parameter(torch.zeros(5))]
    for parameter in parameters:
        parameter.grad = torch.arange(1.0, 1 + parameter.numel()).reshape(parameter.shape) / 5
    own = {str(number): parameter.grad.clone() for number, parameter in enumerate(parameters)}
    clip(own, torch.nn.utils.clip_grad_norm_(parameters, most), most)
    for number, parameter in enumerate(parameters):
        torch.testing.assert_close(own[str(number)], parameter.grad)
