"""Copies that take turns: what is sent is hidden where others compute, and never more than that."""

from hypothesis import given
from hypothesis import strategies as st

from costmodels import CostModelError, backward_slots_of, interleaved_time, paired_time, slots_of
from tests.refusals import refused

SLOTS = st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 10.0)), min_size=1, max_size=8)


def test_two_copies_hide_what_is_as_long_as_their_work() -> None:
    """One computes 1 second while what the other has sent is on its way for 1 second."""
    assert interleaved_time([(1.0, 1.0), (1.0, 1.0), (1.0, 0.0)], 1) == 5.0
    assert interleaved_time([(1.0, 1.0), (1.0, 1.0), (1.0, 0.0)], 2) == 6.0


def test_a_link_that_is_slower_than_the_work_sets_the_pace() -> None:
    """The first second and the last are work that nothing hides; four messages of 3 seconds go one after the other."""
    assert interleaved_time([(1.0, 3.0), (1.0, 3.0), (1.0, 0.0)], 2) == 14.0


@given(SLOTS, st.integers(1, 4))
def test_no_resource_is_used_twice_at_once(slots: list[tuple[float, float]], copies: int) -> None:
    alone = interleaved_time(slots, 1)
    found = interleaved_time(slots, copies)
    work, sent = (copies * sum(part) for part in zip(*slots, strict=True))
    assert max(work, sent, alone) - 1e-9 <= found <= copies * alone + 1e-9


def test_slots_end_where_something_is_sent() -> None:
    """Forward an operator gets its operands first; backward it computes first, and the last one comes first."""
    operators = [(None, 1.0), (2.0, 3.0), (None, 4.0), (5.0, 6.0)]
    assert slots_of(operators) == [(1.0, 2.0), (7.0, 5.0), (6.0, 0.0)]
    assert backward_slots_of(operators) == [(6.0, 5.0), (7.0, 2.0), (1.0, 0.0)]


def test_a_turn_without_a_message_takes_its_cover_from_another() -> None:
    """The sums of both copies are 3 seconds on their way. The second is covered by what the first computes, 4 seconds
    where it goes on to its next message, and 1 second where it stops before, for something that is sent on the way
    back."""
    whole, stopped = ([(4.0, 3.0), *rest] for rest in ([(5.0, 0.0)], [(1.0, 0.0), (4.0, 0.0)]))
    assert slots_of([(3.0, 1.0), (0.0, 4.0)]) == [(0.0, 3.0), (1.0, 0.0), (4.0, 0.0)]
    assert interleaved_time(whole, 2) == 18.0
    assert interleaved_time(stopped, 2) == 20.0


def test_no_copy_is_an_error() -> None:
    with refused(CostModelError, 0):
        interleaved_time([(1.0, 1.0)], 0)


@given(SLOTS, SLOTS)
def test_two_passes_take_no_longer_together_than_after_one_another(
    one: list[tuple[float, float]], other: list[tuple[float, float]]
) -> None:
    alone = [interleaved_time(slots, 1) for slots in (one, other)]
    work, sent = (sum(part) for part in zip(*one, *other, strict=True))
    assert max(work, sent, *alone) - 1e-9 <= paired_time(one, other) <= sum(alone) + 1e-9
    assert paired_time(one, one) == interleaved_time(one, 2)
