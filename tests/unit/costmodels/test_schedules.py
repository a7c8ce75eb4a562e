import numpy as np
import pytest

from costmodels import (
    CostModelError,
    bubble_fraction,
    in_flight,
    in_flight_of_chunks,
    moments_in_flight,
    most_in_flight,
    order_interleaved_1f1b,
    step_time,
)
from tests.refusals import refused


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
    with refused(CostModelError, 4, "0..3"):
        in_flight(4, 4, 8)
    with refused(CostModelError, "0 and 1"):
        step_time([], [], 1)
    with refused(CostModelError, "1 and 0"):
        step_time([1.0], [0.0], 0)
    with refused(CostModelError, 2, "once_seconds", 1):
        step_time([1.0, 1.0], [0.0], 1)


def ended(stages: int, virtual: int, parts: int, forward: float, backward: float) -> tuple[float, list[list[int]]]:
    """All stages at once, event by event: when the last turn ends, and how many micro-batches each chunk of each stage
    held at most. Chunks of equal time; a turn starts when its stage is free and what it reads has been made."""
    orders = [list(order_interleaved_1f1b(stage, stages, virtual, parts)) for stage in range(stages)]
    done: dict[tuple[str, int, int], float] = {}  # kind, chunk of the model, micro-batch
    clock, at = [0.0] * stages, [0] * stages
    held = [[0] * virtual for _ in range(stages)]
    most = [[0] * virtual for _ in range(stages)]
    last = stages * virtual - 1
    while any(at[stage] < len(orders[stage]) for stage in range(stages)):
        moved = False
        for stage in range(stages):
            if at[stage] == len(orders[stage]):
                continue
            turn = orders[stage][at[stage]]
            chunk, part = turn.chunk * stages + stage, turn.micro_batch
            if turn.kind == "forward":
                needs = [("forward", chunk - 1, part)] if chunk else []
            else:
                needs = [("backward", chunk + 1, part)] if chunk < last else [("forward", chunk, part)]
            if any(need not in done for need in needs):
                continue
            start = max([clock[stage], *(done[need] for need in needs)])
            clock[stage] = start + (forward if turn.kind == "forward" else backward)
            done[turn.kind, chunk, part] = clock[stage]
            held[stage][turn.chunk] += 1 if turn.kind == "forward" else -1
            most[stage][turn.chunk] = max(most[stage][turn.chunk], held[stage][turn.chunk])
            at[stage] += 1
            moved = True
        assert moved, "no stage can go on"
    assert len(done) == 2 * stages * virtual * parts
    return max(clock), most


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("virtual", [2, 3, 4])
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_interleaved_stages_event_by_event(stages: int, virtual: int, rounds: int) -> None:
    parts = rounds * stages
    for forward, backward in ((1.0, 1.0), (1.0, 2.0), (1.0, 3.0)):
        seconds, most = ended(stages, virtual, parts, forward, backward)
        whole = virtual * (forward + backward)
        assert seconds == pytest.approx(step_time([whole] * stages, [0.0] * stages, parts, virtual))
    assert [list(in_flight_of_chunks(stage, stages, virtual, parts)) for stage in range(stages)] == most


@pytest.mark.parametrize(("stages", "virtual", "rounds"), [(2, 2, 1), (2, 3, 4), (4, 5, 3), (8, 8, 4), (4, 1, 2)])
def test_chunks_together_hold_no_more_than_any_moment_of_the_order(stages: int, virtual: int, rounds: int) -> None:
    parts = rounds * stages
    for stage in range(stages):
        moments = moments_in_flight(stage, stages, virtual, parts)
        most = most_in_flight(order_interleaved_1f1b(stage, stages, virtual, parts))
        assert max(map(sum, moments)) == most <= sum(in_flight_of_chunks(stage, stages, virtual, parts))


def test_interleaving_shrinks_the_published_bubble() -> None:
    assert bubble_fraction([2.0] * 4, 8, 2) == pytest.approx(3 / (2 * 8 + 3))
    assert step_time([1.0, 2.0, 1.0, 2.0], [0.1, 0.2, 0.5, 0.0], 4, 2) == pytest.approx(4 * 2 + 4 / 2 + 0.5)


def test_one_chunk_is_plain_1f1b() -> None:
    assert [in_flight_of_chunks(stage, 4, 1, 8) for stage in range(4)] == [(4,), (3,), (2,), (1,)]
    assert step_time([1.0, 2.0], [0.0, 0.0], 3, 1) == step_time([1.0, 2.0], [0.0, 0.0], 3)


def test_the_order_of_a_small_interleaved_pipeline() -> None:
    """Two stages of two chunks, two micro-batches: all forwards of stage 0 come first, stage 1 alternates earlier."""
    words = [
        "".join(f"{turn.kind[0]}{turn.chunk}{turn.micro_batch} " for turn in order_interleaved_1f1b(stage, 2, 2, 2))
        for stage in range(2)
    ]
    assert words == ["f00 f01 f10 f11 b10 b11 b00 b01 ", "f00 f01 f10 b10 f11 b11 b00 b01 "]


def test_refusals_of_interleaved_stages() -> None:
    with refused(CostModelError, 2, 4, 6):
        order_interleaved_1f1b(0, 4, 2, 6)
    with refused(CostModelError, "virtual", 0):
        in_flight_of_chunks(0, 4, 0, 4)
    with refused(CostModelError, 4, "0..3"):
        in_flight_of_chunks(4, 4, 2, 4)
