"""The loss of logits that may be split: what it refuses."""

import pytest
import torch

from runtime.cross_entropy import SplitLoss, split_cross_entropy

SPLIT = SplitLoss(
    vocabulary_groups=(),
    sample_groups=(),
    offset=0,
    classes=5,
    mean=True,
    ignore_index=-100,
    label_smoothing=0.0,
)


@pytest.mark.parametrize("target", [5, -1])
def test_a_target_that_is_no_class_is_refused(target: int) -> None:
    with pytest.raises(RuntimeError, match=r"outside of the 5 that there are, 0 to 4, and is not -100"):
        split_cross_entropy(torch.randn(3, 5), torch.tensor([0, target, 2]), SPLIT)


def test_an_ignored_target_may_be_any_number() -> None:
    logits, targets = torch.randn(3, 5), torch.tensor([0, -100, 4])
    torch.testing.assert_close(
        split_cross_entropy(logits, targets, SPLIT), torch.nn.functional.cross_entropy(logits, targets)
    )
