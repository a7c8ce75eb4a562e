"""Offloaded states on their way to the device and back: a flow shop of three machines with two places."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels import Visit, visit_pace, visit_seconds, visits_time
from hardware_profiles import Store

SECONDS = st.floats(0.0, 10.0)
ROWS = st.lists(st.builds(Visit, SECONDS, SECONDS, SECONDS), min_size=1, max_size=12)


def test_a_single_state_hides_nothing_but_what_others_take_before_it() -> None:
    assert visits_time([Visit(3.0, 1.0, 2.0)]) == 6.0
    assert visits_time([Visit(3.0, 1.0, 2.0)], before=2.0) == 6.0
    assert visits_time([Visit(3.0, 1.0, 2.0)], before=5.0) == 8.0
    assert visits_time([], before=5.0) == 5.0


def test_the_third_waits_until_the_first_has_left() -> None:
    """fetch 0-2 2-4, update 2-3 4-5, store 3-5 5-7; the third is fetched from 5 on: 5-7, updated 7-8, stored 8-10."""
    assert visits_time([Visit(2.0, 1.0, 2.0)] * 3) == 10.0


@given(ROWS, SECONDS)
def test_no_machine_does_two_things_at_once_and_nothing_takes_longer_than_one_after_the_other(
    visits: list[Visit], before: float
) -> None:
    found = visits_time(visits, before)
    fetch, update, store = (sum(column) for column in zip(*visits, strict=True))
    assert found >= max(fetch, store, before + update) - 1e-9
    assert found <= before + fetch + update + store + 1e-9


@given(ROWS, SECONDS, st.integers(0, 11), st.integers(0, 2))
def test_no_part_can_take_longer_and_the_whole_less(visits: list[Visit], more: float, at: int, part: int) -> None:
    longer = list(visits)
    index = at % len(visits)
    values = list(longer[index])
    values[part] += more
    longer[index] = Visit(*values)
    assert visits_time(longer) >= visits_time(visits) - 1e-9


@given(SECONDS, SECONDS, SECONDS)
def test_a_long_row_takes_its_pace(fetch: float, update: float, store: float) -> None:
    one = Visit(fetch, update, store)
    pace = float(visit_pace(*(np.array(seconds) for seconds in one)))
    assert visits_time([one] * 60) - visits_time([one] * 40) == pytest.approx(20 * pace, abs=1e-9)


def test_seconds_follow_from_bytes() -> None:
    store = Store(capacity=1e12, read=50e9, write=25e9)
    fetch, back = visit_seconds(np.array([1e9, 0.0]), store, 1e-5)
    assert fetch == pytest.approx([0.02 + 1e-5, 1e-5])
    assert back == pytest.approx([0.04 + 1e-5, 1e-5])
