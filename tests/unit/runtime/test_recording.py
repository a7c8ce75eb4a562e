"""The terms of a step: what a collective takes beyond the least of its group is waiting, and terms sum to the step."""

from itertools import pairwise
from typing import cast

import pytest
import torch.distributed as dist

from hardware_profiles.run_record import TERMS
from runtime.profiling.recording import terms_of, waiting_of, without_waiting
from runtime.waiting import Calls, Waits

LINE, WHOLE = (cast(dist.ProcessGroup, name) for name in ("tensor ranks", "all ranks"))


def step(arrives: float, reduces: float) -> dict[dist.ProcessGroup, list[tuple[str, float]]]:
    """A rank's calls: two on one group, forward and backward, and one on another in the update."""
    return {LINE: [("forward", 0.01 + arrives), ("backward", 0.02)], WHOLE: [("update", 0.03 + reduces)]}


def test_what_is_beyond_the_least_of_a_call_is_waiting_for_later_ranks() -> None:
    early, late = [step(0.5, 0.0), step(0.0, 0.25)], [step(0.0, 0.125), step(0.75, 0.0)]
    least = {LINE: [0.01, 0.02, 0.01, 0.02], WHOLE: [0.03, 0.03]}
    waited = waiting_of(early, least)
    assert waited[0] == pytest.approx({"forward": 0.5, "backward": 0.0, "update": 0.0})
    assert waited[1] == pytest.approx({"forward": 0.0, "backward": 0.0, "update": 0.25})
    assert [round(sum(one.values()), 9) for one in waiting_of(late, least)] == [0.125, 0.75]


def test_terms_sum_to_the_step_with_and_without_waiting() -> None:
    waits = Waits(
        phases={"forward": (1.0, 0.9), "backward": (2.0, 1.5), "update": (0.5, 0.4)},
        calls={
            ("forward", "all_reduce"): Calls(count=1, seconds=0.25),
            ("update", "wait"): Calls(count=2, seconds=0.125),
            ("", "recv"): Calls(count=1, seconds=0.5),
        },
    )
    terms = terms_of(4.25, waits)
    assert terms["waiting"] == 0.0
    assert terms["communication"] == 0.25
    found = without_waiting(terms, {"forward": 0.125, "update": 0.0625, "": 0.25})
    assert tuple(found) == TERMS
    assert found["waiting"] == 0.4375
    assert (found["communication"], found["reduction"], found["transfer"]) == (0.125, 0.0625, 0.25)
    for one, other in pairwise((terms, found)):
        assert sum(one.values()) == sum(other.values()) == 4.25
        assert one["forward"] == other["forward"] == 0.75
