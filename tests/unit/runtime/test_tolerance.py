"""By how much the losses of a run and of the unsharded model may differ."""

import math

import pytest

from runtime.launch.training import TOLERANCE, tolerance_of
from runtime.processes.progress import EvaluationReport


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_losses_in_fp8_may_differ_as_in_16_bits(precision: str) -> None:
    assert tolerance_of(precision, fp8=False) == TOLERANCE[precision]
    assert tolerance_of(precision, fp8=True) == max(TOLERANCE[precision], 5e-3)


def test_losses_that_are_no_numbers_alike_agree_in_evaluation() -> None:
    """As where all targets of a data set are ignored."""

    def report(loss: float, unsharded: float) -> EvaluationReport:
        return EvaluationReport(
            step=0,
            data="data",
            loss=loss,
            unsharded=unsharded,
            seconds=1.0,
            batches=1,
            samples=8,
            tokens=None,
            left_out=0,
        )

    assert report(math.nan, math.nan).difference == 0.0
    assert report(math.nan, 1.0).difference == report(1.0, math.nan).difference == math.inf
    assert report(1.5, 1.0).difference == 0.5
