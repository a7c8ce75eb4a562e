"""What is predicted of tensor parallelism under its products is what the runtime emits: collectives by their chunks,
products, and live memory."""

from dataclasses import dataclass

import pytest

from planner.plan.plan import Plan
from tests.contract.test_audit import LOOSER, audited
from tests.contract.test_priced_is_emitted import FULL, KEEPING, Hand
from tests.distributed.overlapping import overlapped

SOME_PRODUCTS = {"recomputation": "selective", "kept": ("q_proj/linear", "gate_proj/linear")}
PIPELINED = {"stages": (2, 2), "micro_batches": 4, "global_batch": 8}


@dataclass(frozen=True, kw_only=True)
class Overlapped(Hand):
    """A plan whose collectives go in so many chunks, there and back."""

    chunks: tuple[int, ...] = (2, 2)

    def __call__(self) -> Plan:
        return overlapped(super().__call__(), self.model, *self.chunks)

    def __str__(self) -> str:
        return f"{super().__str__()}-{self.chunks}"


CASES = (
    Overlapped(model="llama", kind="sequence", mesh=(1, 2)),
    Overlapped(model="frozen", kind="sequence", mesh=(1, 2)),
    Overlapped(model="llama", kind="megatron", mesh=(2, 2), settings={"micro_batches": 2, **FULL}),
    Overlapped(model="llama4", kind="sequence", mesh=(1, 2), settings=PIPELINED, chunks=(1, 2)),
    Overlapped(model="llama", kind="sequence_zero3", mesh=(2, 2), settings=FULL, chunks=(2, 1)),
    Overlapped(model="llama", kind="megatron", mesh=(1, 4), chunks=(2, 4, 1)),
    Overlapped(model="llama", kind="sequence", mesh=(2, 2), settings=KEEPING),
    Overlapped(model="llama", kind="sequence", mesh=(1, 2), settings=SOME_PRODUCTS, chunks=(2, 2, 1)),
    *(Overlapped(model="gpt", kind=seed, mesh=(2, 2), settings=FULL) for seed in range(3, 8)),
    *(Overlapped(model="llama", kind=seed, mesh=(4,)) for seed in range(4)),
)


@pytest.mark.cases(2, 4)
@pytest.mark.slow
@pytest.mark.parametrize("make", CASES, ids=str)
def test_overlaps_send_and_compute_as_predicted(make: Overlapped) -> None:
    for stage in audited(make):
        assert stage.unequal == ()
        assert abs(stage.peak / stage.predicted_peak - 1) < LOOSER, (stage.live, stage.predicted_live)
        assert stage.peak <= stage.stated
