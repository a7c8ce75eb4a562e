"""Copies that take turns: what is sent is hidden where others compute, and never more than that."""

from hypothesis import given
from hypothesis import strategies as st

from costmodels import (
    CostModelError,
    Part,
    Slot,
    Then,
    backward_slots_of,
    interleaved_time,
    paired_time,
    slots_of,
    turns_of,
)
from tests.refusals import refused

TIMES = st.floats(0.0, 10.0)
SLOTS = st.lists(st.builds(Slot, TIMES, TIMES, st.just("work")), min_size=1, max_size=8)
PAUSED = st.lists(st.builds(Slot, TIMES, TIMES), min_size=1, max_size=8)


def test_two_copies_hide_what_is_as_long_as_their_work() -> None:
    """One computes 1 second while what the other has sent is on its way for 1 second."""
    assert interleaved_time([Slot(1.0, 1.0), Slot(1.0, 1.0), Slot(1.0, 0.0)], 1) == 5.0
    assert interleaved_time([Slot(1.0, 1.0), Slot(1.0, 1.0), Slot(1.0, 0.0)], 2) == 6.0


def test_a_link_that_is_slower_than_the_work_sets_the_pace() -> None:
    """The first second and the last are work that nothing hides; four messages of 3 seconds go one after the other."""
    assert interleaved_time([Slot(1.0, 3.0), Slot(1.0, 3.0), Slot(1.0, 0.0)], 2) == 14.0


@given(PAUSED, st.integers(1, 4))
def test_no_resource_is_used_twice_at_once(slots: list[Slot], copies: int) -> None:
    alone = interleaved_time(slots, 1)
    found = interleaved_time(slots, copies)
    work, sent = (copies * sum(part) for part in zip(*[slot[:2] for slot in slots], strict=True))
    assert max(work, sent, alone) - 1e-9 <= found <= copies * alone + 1e-9


def test_slots_end_where_something_is_sent() -> None:
    """Forward an operator gets its operands first; backward it computes first, and the last one comes first."""
    operators = [Part(None, 1.0), Part(2.0, 3.0), Part(None, 4.0), Part(5.0, 6.0)]
    assert slots_of(operators) == [Slot(1.0, 2.0), Slot(7.0, 5.0), Slot(6.0, 0.0)]
    assert backward_slots_of(operators) == [Slot(6.0, 5.0), Slot(7.0, 2.0), Slot(1.0, 0.0)]


def test_a_turn_without_a_message_takes_its_cover_from_another() -> None:
    """The sums of both copies are 3 seconds on their way. The second is covered by what the first computes, 4 seconds
    where it goes on to its next message, and 1 second where it stops before, for something that is sent on the way
    back."""
    whole, stopped = ([Slot(4.0, 3.0), *rest] for rest in ([Slot(5.0, 0.0)], [Slot(1.0, 0.0), Slot(4.0, 0.0)]))
    assert slots_of([Part(3.0, 1.0), Part(0.0, 4.0)]) == [Slot(0.0, 3.0), Slot(1.0, 0.0), Slot(4.0, 0.0)]
    assert interleaved_time(whole, 2) == 18.0
    assert interleaved_time(stopped, 2) == 20.0


def test_what_is_brief_between_two_messages_is_done_in_a_pause_of_the_other() -> None:
    """Messages of 2 seconds before and behind what takes no time, between products of 4 seconds with a pause in the
    middle. All but those at the ends are covered; without the pauses half of them are not."""
    layer: list[Then] = ["pause", "brief", "work"]
    assert turns_of(["pause", "brief", "work", "pause"], 2) == [0, 0, 1, 0, 1, 0, 1, 0, 1, 1]
    seconds = {"pause": (2.0, 0.0), "brief": (2.0, 2.0), "work": (0.0, 2.0)}
    slots = [*[Slot(*seconds[then], then) for then in 8 * layer], Slot(4.0, 0.0)]
    work, sent = 2 * sum(slot.computed for slot in slots), 2 * sum(slot.sent for slot in slots)
    found = interleaved_time(slots, 2)
    assert max(work, sent) <= found <= work + 4.0
    at_ends_alone = [slot._replace(then="work") for slot in slots if slot.then != "pause"]
    at_ends_alone = [slot._replace(computed=4.0 if slot.computed else 0.0) for slot in at_ends_alone]
    assert interleaved_time(at_ends_alone, 2) >= work + 0.4 * sent


@given(st.lists(st.sampled_from(["work", "brief", "pause"]), max_size=12), st.integers(1, 4))
def test_backward_turns_are_those_of_the_forward_pass_from_the_last_to_the_first(
    thens: list[Then], copies: int
) -> None:
    forward = turns_of(thens, copies)
    assert [forward.count(copy) for copy in range(copies)] == [len(thens) + 1] * copies
    assert turns_of(thens[::-1], copies, backward=True) == forward[::-1]


def test_no_copy_is_an_error() -> None:
    with refused(CostModelError, 0):
        interleaved_time([Slot(1.0, 1.0)], 0)


@given(SLOTS, SLOTS)
def test_two_passes_take_no_longer_together_than_after_one_another(one: list[Slot], other: list[Slot]) -> None:
    alone = [interleaved_time(slots, 1) for slots in (one, other)]
    work, sent = (sum(part) for part in zip(*[slot[:2] for slot in (*one, *other)], strict=True))
    assert max(work, sent, *alone) - 1e-9 <= paired_time(one, other) <= sum(alone) + 1e-9
    assert paired_time(one, one) == interleaved_time(one, 2)
