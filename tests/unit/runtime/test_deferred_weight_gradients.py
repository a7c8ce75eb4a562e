"""Weight deferred gradients: nothing of them before their turn, and all of them after it."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from runtime.executor.deferred_weight_gradients import DeferredGradients


def instruction(index: int, shape: tuple[int, ...]) -> SimpleNamespace:
    return SimpleNamespace(index=index, repeated=True, results=(("y", shape),))


def network(
    deferred_weight_gradients: DeferredGradients | None, x: torch.Tensor, weights: list[torch.Tensor]
) -> torch.Tensor:
    for index, weight in enumerate(weights):
        operands = [x, weight, weight.sum(1)]
        if deferred_weight_gradients is None:
            x = F.linear(*operands)
        else:
            (x,) = deferred_weight_gradients.run(
                instruction(index, (3, 4)), lambda given: (F.linear(*given),), None, operands
            )
        x = torch.tanh(x)
    return x.sum()


def leaves() -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(n, 4, generator=generator).requires_grad_() for n in (3, 4, 4)]
    return made[0], made[1:]


@pytest.mark.parametrize("again", [False, True])
def test_the_turns_of_a_backward_pass(again: bool) -> None:
    x, weights = leaves()
    network(None, x, weights).backward()
    wanted = [x.grad, *(weight.grad for weight in weights)]
    x, weights = leaves()
    deferred_weight_gradients = DeferredGradients()
    loss = (
        checkpoint(network, deferred_weight_gradients, x, weights, use_reentrant=False)
        if again
        else network(deferred_weight_gradients, x, weights)
    )
    loss.backward()
    assert all(weight.grad is None for weight in weights)
    torch.testing.assert_close(x.grad, wanted[0])
    deferred_weight_gradients.finish()
    for weight, gradient in zip(weights, wanted[1:], strict=True):
        torch.testing.assert_close(weight.grad, gradient)
    deferred_weight_gradients.finish()  # nothing waits any more
    torch.testing.assert_close(weights[0].grad, wanted[1])


def test_a_product_without_a_gradient_leaves_none() -> None:
    x, weights = leaves()
    deferred_weight_gradients = DeferredGradients()
    network(deferred_weight_gradients, x, weights)
    deferred_weight_gradients.finish()
    assert all(weight.grad is None for weight in weights)
