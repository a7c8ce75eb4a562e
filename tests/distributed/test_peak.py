"""The memory of a process stays below the prediction, first step and checkpoint included: plans fill their devices.

Tensors are counted, below autograd, as operators allocate them; malloc, Python and gloo are what profiles reserve.
What is predicted is that with the margin that plans keep for its error (`Software.peak_high`). Random plans
redistribute logits and the like in ways that no search would choose, such as gathering them along their words into one
buffer and copying it into another.
"""

import pytest

from runtime.step.checksums import AT_ONCE
from tests.long_lists import rarely

CHECK = 3 * 8 * AT_ONCE["cpu"] + 2**20
"""Bytes of the buffers of a check, and of its sums."""
SETTINGS = ({}, {"micro_batches": 2}, {"recomputation": "full"}, {"micro_batches": 2, "recomputation": "full"})


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *rarely(range(2, 51))])
def test_a_process_stays_below_what_is_predicted(pair, seed: int) -> None:
    for _, peak, predicted in pair.run("tasks_peak", "peak_of", (2,), seed, SETTINGS[seed % 4], True):
        assert peak <= predicted + CHECK, f"{peak / 2**20:.1f} MiB, predicted {predicted / 2**20:.1f} MiB"


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_a_check_takes_its_buffers_and_nothing_else(pair, seed: int) -> None:
    """It was a third of a GiB."""
    runs = [pair.run("tasks_peak", "peak_of", (2,), seed, SETTINGS[seed % 4], check) for check in (True, False)]
    for (checked, *_), (plain, *_) in zip(*runs, strict=True):
        assert checked <= plain + CHECK, f"{checked / 2**20:.1f} MiB, without a check {plain / 2**20:.1f} MiB"


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_plan_of_a_search_stays_below_without_more(pair, zero: int) -> None:
    for _, peak, predicted in pair.run("tasks_peak", "peak_of_searched", zero):
        assert peak <= predicted + CHECK, f"{peak / 2**20:.1f} MiB, predicted {predicted / 2**20:.1f} MiB"
