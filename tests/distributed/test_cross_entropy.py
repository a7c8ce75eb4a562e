"""Cross entropy under every mixture of split vocabulary and split samples, with ignored targets."""

import pytest
import torch


@pytest.mark.cases(1, 2)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_equals_torch_in_float32(pool, reduction: str, label_smoothing: float) -> None:
    assert max(pool.run("tasks", "cross_entropy", reduction, label_smoothing, torch.float32)) < 1e-6


@pytest.mark.thorough
def test_equals_torch_in_bfloat16_up_to_its_rounding(pool) -> None:
    assert max(pool.run("tasks", "cross_entropy", "mean", 0.0, torch.bfloat16)) < 2e-2
