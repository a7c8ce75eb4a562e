import numpy as np
import pytest

from costmodels import CostModelError, bubble_fraction, in_flight, step_time


def test_step_by_hand() -> None:
    assert step_time([1.0, 2.0, 1.0], [0.1, 0.2, 0.5], 4) == pytest.approx(4 + 3 * 2 + 0.5)
    assert step_time([3.0], [0.0], 1) == 3


def test_equal_stages_have_the_published_bubble() -> None:
    assert bubble_fraction([2.0] * 4, 8) == pytest.approx(3 / (8 + 3))
    assert bubble_fraction([2.0], 8) == 0


def test_stages_may_be_arrays() -> None:
    stages = [np.array([1.0, 2.0]), np.array([3.0, 1.0])]
    assert step_time(stages, [0.0, np.array([1.0, 0.0])], 3) == pytest.approx([4 + 6 + 1, 3 + 4])


def test_first_stage_holds_most() -> None:
    assert [in_flight(stage, 4, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight(stage, 4, 2) for stage in range(4)] == [2, 2, 2, 1]


def test_refusals() -> None:
    with pytest.raises(CostModelError, match=r"stage 4 is not one of 0\.\.3"):
        in_flight(4, 4, 8)
    with pytest.raises(CostModelError, match="got 0 and 1"):
        step_time([], [], 1)
    with pytest.raises(CostModelError, match="got 1 and 0"):
        step_time([1.0], [0.0], 0)
    with pytest.raises(CostModelError, match="2 stages, but once_seconds has 1 entries"):
        step_time([1.0, 1.0], [0.0], 1)
