"""The convention of a measured peak."""

from dataclasses import replace

import pytest

from hardware_profiles import PYTORCH, load_profile
from planner.plan.plan import Prediction, StagePrediction
from planner.validation.pricing.peak import Peaks, is_of_last_rank, kind_of_peak, least_needed, peak_ends, peak_of
from planner.validation.reading.cells import PeakKind
from planner.validation.reading.rows import Row

DEVICE = load_profile("a100-80gb").device


@pytest.mark.parametrize(
    ("notes", "kind"),
    [
        ("Mem = nvidia-smi max on first/last nodes", "used"),
        ('memory in GB as nvidia-smi-like "used/80"', "used"),
        ("16.3 GiB max_memory_reserved worst rank", "reserved"),
        ("peak = torch max_memory_allocated (reported rank)", "allocated"),
        ('max over printed ranks of "max allocated memory"', "allocated"),
        ("iter time derived", None),
    ],
)
def test_words_of_a_kind(notes: str, kind: PeakKind | None) -> None:
    assert kind_of_peak(Row(line=2, values={"notes": notes})) == kind
    assert kind_of_peak(Row(line=2, values={"notes": notes, "peak_mem_kind": "Reserved"})) == "reserved"


def test_kinds_count_less_and_less() -> None:
    tensors = 10e9
    peak = tensors * (1 + DEVICE.allocator_slack) + DEVICE.reserved
    peaks = Peaks(tensors=peak, held=peak)
    assert peak_of(peaks, DEVICE, PYTORCH, "used") == peak
    assert peak_of(peaks, DEVICE, PYTORCH, "reserved") == peak - DEVICE.reserved
    assert peak_of(peaks, DEVICE, PYTORCH, "allocated") == pytest.approx(tensors)
    assert least_needed(peaks, DEVICE, PYTORCH) == pytest.approx(tensors + DEVICE.reserved)
    for memory, used in ((peak - 1.0, peak - 1.0), (1.0, tensors + DEVICE.reserved)):
        assert peak_of(peaks, replace(DEVICE, memory=memory), PYTORCH, "used") == pytest.approx(used)
    one_group = replace(PYTORCH, communicators=0.2)
    less = 0.8 * (DEVICE.reserved - 0.5 * 2**30)  # all but the context
    assert peak_of(peaks, DEVICE, one_group, "reserved") == pytest.approx(peak - DEVICE.reserved + less)
    software = replace(PYTORCH, peak_low=0.9, peak_high=1.1)
    assert peak_ends(peaks, DEVICE, software, "used") == pytest.approx((0.9 * peak, 1.1 * peak))
    assert peak_ends(peaks, DEVICE, software, None) == pytest.approx((0.9 * tensors, 1.1 * peak))


def test_the_last_rank_is_of_the_last_stage() -> None:
    def predicted(*peaks: float) -> Prediction:
        stages = tuple(StagePrediction(micro_batch_seconds=1.0, once_seconds=0.0, peak_bytes=one) for one in peaks)
        return replace(Prediction.unknown(), peak_bytes=max(peaks), stages=stages)

    tensors, held = predicted(9.0, 5.0), predicted(10.0, 7.0)
    assert Peaks.of(tensors, held) == Peaks(tensors=9.0, held=10.0)
    assert Peaks.of(tensors, held, last=True) == Peaks(tensors=5.0, held=7.0)
    assert Peaks.of(tensors, last=True) == Peaks(tensors=5.0, held=5.0)
    for notes, last in (("max_memory_allocated (reported rank)", True), ("the worst rank", False)):
        assert is_of_last_rank(Row(line=2, values={"notes": notes})) == last
