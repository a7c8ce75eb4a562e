"""The convention of a measured peak."""

import pytest

from hardware_profiles import load_profile
from planner.plan.plan import Prediction
from planner.validation.peak import Convention, convention_of, peak_of
from planner.validation.rows import Row

DEVICE = load_profile("a100-80gb").device


@pytest.mark.parametrize(
    ("notes", "convention"),
    [
        ("Mem = nvidia-smi max on first/last nodes", "used"),
        ('memory in GB as nvidia-smi-like "used/80"', "used"),
        ("16.3 GiB max_memory_reserved worst rank", "reserved"),
        ("peak = torch max_memory_allocated (reported rank)", "allocated"),
        ('max over printed ranks of "max allocated memory"', "allocated"),
        ("iter time derived", "used"),
    ],
)
def test_words_of_a_convention(notes: str, convention: Convention) -> None:
    assert convention_of(Row(line=2, values={"notes": notes})) == convention


def test_conventions_count_less_and_less() -> None:
    tensors = 10e9
    peak = tensors * (1 + DEVICE.allocator_slack) + DEVICE.reserved
    prediction = Prediction(
        step_seconds=1.0,
        objective_seconds=1.0,
        peak_bytes=peak,
        capacity_bytes=DEVICE.memory,
        model_flops=1.0,
        model_flops_utilisation=0.5,
        samples_per_second=1.0,
        time=(),
        memory=(),
        stages=(),
    )
    assert peak_of(prediction, DEVICE, "used") == peak
    assert peak_of(prediction, DEVICE, "reserved") == peak - DEVICE.reserved
    assert peak_of(prediction, DEVICE, "allocated") == pytest.approx(tensors)
