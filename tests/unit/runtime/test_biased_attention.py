"""Attention with a trained bias computes what PyTorch's does, forward and backward, and keeps no scores."""

import pytest
import torch
import torch.nn.functional as F

from runtime.ops.attention.biased_attention import biased_attention


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("shape", [(1, 3, 5, 7), (2, 1, 5, 7), (2, 3, 5, 7), (3, 1, 7), (5, 7)], ids=str)
def test_equals_pytorch(shape: tuple[int, ...], scale: float | None) -> None:
    torch.manual_seed(0)
    draw = lambda *sizes: torch.randn(sizes, dtype=torch.float64, requires_grad=True)  # noqa: E731
    leaves = [draw(2, 3, 5, 4), draw(2, 3, 7, 4), draw(2, 3, 7, 6), draw(*shape)]
    found = biased_attention(*leaves, scale)
    wanted = F.scaled_dot_product_attention(*leaves[:3], attn_mask=leaves[3], scale=scale)
    torch.testing.assert_close(found, wanted)
    gradient = torch.randn_like(found)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, gradient), torch.autograd.grad(wanted, leaves, gradient)
    )


def test_keeps_no_scores() -> None:
    leaves = [torch.randn(1, 2, 32, 4, requires_grad=True) for _ in range(3)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        biased_attention(*leaves, torch.zeros(1, 1, 1, 32, requires_grad=True))
    assert max(kept) == 1 * 2 * 32 * 4
