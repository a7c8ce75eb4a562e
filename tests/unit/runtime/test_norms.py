"""Gradients are clipped as PyTorch clips them, and left alone where they are short."""

import pytest
import torch

from runtime.update.norms import clip


@pytest.mark.parametrize("most", [0.5, 20.0])
def test_clipped_gradients_are_those_of_pytorch(most: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3, 4)), torch.nn.Parameter(torch.zeros(5))]
    for parameter in parameters:
        parameter.grad = torch.arange(1.0, 1 + parameter.numel()).reshape(parameter.shape) / 5
    own = {str(number): parameter.grad.clone() for number, parameter in enumerate(parameters)}
    clip(own, torch.nn.utils.clip_grad_norm_(parameters, most), most)
    for number, parameter in enumerate(parameters):
        torch.testing.assert_close(own[str(number)], parameter.grad)
