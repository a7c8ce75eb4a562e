"""The fused RMS norm computes what PyTorch's does, forward and backward, and keeps less."""

import pytest
import torch
import torch.nn.functional as F

from runtime.ops.rms_norm import fused_rms_norm


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("epsilon", [1e-5, None])
@pytest.mark.parametrize("shape", [(8,), (5, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_pytorch(dtype: torch.dtype, shape: tuple[int, ...], epsilon: float | None, weighted: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(shape, dtype=dtype, requires_grad=True) if weighted else None
    gradient = torch.randn(3, 5, 8, dtype=dtype)
    leaves = [leaf for leaf in (x, weight) if leaf is not None]
    found = fused_rms_norm(x, shape, weight, epsilon)
    wanted = F.rms_norm(x, shape, weight, epsilon)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, gradient), torch.autograd.grad(wanted, leaves, gradient)
    )


def test_keeps_the_input_and_one_number_for_each_row() -> None:
    x, weight = torch.randn(4, 6, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fused_rms_norm(x, (8,), weight)
    assert sorted(tensor.numel() for tensor in kept) == [8, 4 * 6, 4 * 6 * 8]
