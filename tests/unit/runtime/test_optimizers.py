"""What torch's optimizers are given to go on from a checkpoint."""

import pytest
import torch

from runtime.optimizers.optimizers import OptimizerSettings, kept_of, make_optimizer, moments_of, start_moments

ELSEWHERE = torch.device("meta")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [True, None])
def test_updates_are_counted_where_they_are_read(fused: bool | None, dtype: torch.dtype) -> None:
    """One kernel reads their number on the device of the weights; a chain of kernels is told it by the host."""
    weights = [torch.zeros(shape, device=ELSEWHERE, dtype=dtype) for shape in ((3, 4), (5,))]
    settings = OptimizerSettings(fused=fused)
    optimizer = make_optimizer("adamw", weights, settings)
    start_moments(optimizer, weights, moments_of("adamw", settings), 7)
    steps = [kept["step"] for kept in kept_of(optimizer)]
    assert [step.device for step in steps] == [ELSEWHERE if fused else torch.device("cpu")] * 2
    assert all(step.dtype == torch.float32 for step in steps)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_parts_of_rows_are_updated_as_whole_weights_are(name: str) -> None:
    """The kernel that updates all weights at once looks at no strides."""
    whole, gradient = torch.randn(6, 8), torch.randn(6, 4)
    parts = [whole[:, :4], whole[:, 4:].clone()]
    apart = [part.clone() for part in parts]
    for weights, fused in ((parts, True), (apart, False)):
        optimizer = make_optimizer(name, weights, OptimizerSettings(fused=fused, learning_rate=0.1))
        for _ in range(2):
            for weight in weights:
                weight.grad = gradient.clone()
            optimizer.step()
    assert not parts[0].is_contiguous()
    for one, other in zip(parts, apart, strict=True):
        torch.testing.assert_close(one, other)
