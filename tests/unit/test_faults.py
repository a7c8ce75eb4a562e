"""What is refused, under the name that each reader has for the option."""

import pytest

from planner.errors import PlanFileError, RequestError
from planner.faults import Fault, assigned, named, refuse, said
from planner.plan.refusing import plan_key, refuse_plan

UNDIVIDED = Fault(option="interleave", value="3", reason="does not divide micro_batches = 4", hint="take 2 or 4")


def test_each_reader_has_a_name_of_its_own_for_the_option() -> None:
    text = "3 does not divide micro_batches = 4; take 2 or 4"
    assert str(UNDIVIDED) == text
    assert said(UNDIVIDED, assigned) == f"interleave = {text}"
    assert said(UNDIVIDED, named) == f"interleave: {text}"
    assert said(UNDIVIDED, plan_key) == f"training.interleave: {text}"


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault(reason="nothing divides"), "nothing divides"),
        (Fault(option="mesh", reason="axes of one name", hint="rename one"), "mesh = axes of one name; rename one"),
        (Fault(option="tensor", value="0", reason=": a degree is 1 or more"), "tensor = 0: a degree is 1 or more"),
        (Fault(option="gathers", value="'block'", reason=", but 2 take turns"), "gathers = 'block', but 2 take turns"),
    ],
)
def test_what_is_empty_is_left_out(fault: Fault, text: str) -> None:
    assert said(fault, assigned) == text


def test_a_fault_is_raised_and_nothing_is_not() -> None:
    refuse(None, RequestError)
    refuse_plan(None)
    with pytest.raises(RequestError, match=r"^interleave: 3"):
        refuse(UNDIVIDED, RequestError)
    with pytest.raises(PlanFileError, match=r"^training\.interleave: 3"):
        refuse_plan(UNDIVIDED)


def test_the_key_of_an_option() -> None:
    assert [plan_key(name) for name in ("slices", "place", "clip_norm")] == [
        "slices:",
        "training.placed:",
        "training.clip_norm:",
    ]
