"""The loss of logits that may be split: what it refuses, and that the way where nothing is split makes the same."""

from dataclasses import replace

import pytest
import torch

from runtime.ops.cross_entropy import SplitLoss, split_cross_entropy
from tests.refusals import refused

WHOLE = SplitLoss(
    vocabulary_groups=(),
    sample_groups=(),
    offset=0,
    classes=5,
    mean=True,
    ignore_index=-100,
    label_smoothing=0.0,
)


@pytest.mark.parametrize("target", [9, -1])
def test_a_target_that_is_no_class_is_refused(target: int) -> None:
    targets = torch.tensor([0, target, 2])
    with refused(RuntimeError, "cross entropy", 0, 8, -100):
        split_cross_entropy(torch.randn(3, 5), targets, replace(WHOLE, classes=9))
    with pytest.raises(IndexError, match=f"Target {target} is out of bounds"):
        split_cross_entropy(torch.randn(3, 5), targets, WHOLE)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_columns_that_are_no_classes_do_not_count(label_smoothing: float) -> None:
    """Also where they are larger than all that are."""
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 8), torch.tensor([0, -100, 4])
    logits[:, 5:] = 200.0
    own, known = logits.clone().requires_grad_(), logits[:, :5].clone().requires_grad_()
    loss = split_cross_entropy(own, targets, replace(WHOLE, label_smoothing=label_smoothing))
    expected = torch.nn.functional.cross_entropy(known, targets, label_smoothing=label_smoothing)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(own.grad[:, :5], known.grad)
    assert not own.grad[:, 5:].any()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_whole_is_as_in_torch(mean: bool, label_smoothing: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 5, dtype=dtype), torch.tensor([0, -100, 4])  # one is ignored
    own, known = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = split_cross_entropy(own, targets, replace(WHOLE, mean=mean, label_smoothing=label_smoothing))
    expected = torch.nn.functional.cross_entropy(
        known, targets, reduction="mean" if mean else "sum", label_smoothing=label_smoothing
    )
    for each in (loss, expected):
        (each * 3.0).backward()
    rounding = 2e-2 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(loss, expected, rtol=rounding, atol=rounding)
    torch.testing.assert_close(own.grad, known.grad, rtol=rounding, atol=rounding)
