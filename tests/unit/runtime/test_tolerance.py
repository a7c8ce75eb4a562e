"""By how much the losses of a run and of the unsharded model may differ."""

import pytest

from runtime.launch.training import TOLERANCE, tolerance_of


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_losses_in_fp8_may_differ_as_in_16_bits(precision: str) -> None:
    assert tolerance_of(precision, fp8=False) == TOLERANCE[precision]
    assert tolerance_of(precision, fp8=True) == max(TOLERANCE[precision], 5e-3)
