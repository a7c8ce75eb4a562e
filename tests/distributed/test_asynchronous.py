"""Schedules without a flush train exactly as their definitions say, weights as stale as those and no staler."""

import pytest

from costmodels import order_1f1b
from planner.errors import PlanFileError
from planner.plan.binding.bind import bind
from tests.distributed import plans
from tests.long_lists import first, rarely
from tests.refusals import refused

TOLERANCE = 1e-5
FULL = {"recomputation": "full"}
SELECTIVE = {"recomputation": "selective", "kept": ("linear", "scaled_dot_product_attention", "silu", "norm")}
STALE = 1e-2
"""How far apart weights are at least that were trained with and without staleness."""


def settings(schedule: str, stages: tuple[int, ...], micro_batches: int, **more: object) -> dict[str, object]:
    return {"schedule": schedule, "stages": stages, "micro_batches": micro_batches, **more}


CASES = [
    case
    for schedule in ("pipedream_2bw", "pipedream")
    for case in (
        ("zero2", (2,), [3, 2], settings(schedule, (2, 2), 2)),
        ("zero1", (), [3, 1], settings(schedule, (1, 1, 1, 1), 4)),
        ("megatron", (1, 2), [3], settings(schedule, (1, 3), 2)),
        ("zero3", (2,), [3, 1], settings(schedule, (2, 2), 2, **FULL)),
        ("zero3", (2,), [2, 1], settings(schedule, (2, 2), 2)),
        ("zero1", (2,), [2, 2], settings(schedule, (2, 2), 2, **SELECTIVE)),
        (21, (2,), [3], settings(schedule, (2, 2), 2)),
        (22, (2,), [1, 1, 1], settings(schedule, (3, 1), 4, **FULL)),
    )
]


HALF = len(CASES) // 2
"""Cases of a schedule. Those with two versions are all run; of those with many, which differ in what is stashed, each
second one."""


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("kind", "sizes", "windows", "given"),
    [
        CASES[0],
        CASES[HALF],
        *first(1, CASES[1:HALF]),
        *first(0, CASES[HALF + 1 :: 2]),
        *rarely(CASES[HALF + 2 :: 2]),
    ],
    ids=str,
)
def test_weights_are_as_stale_as_the_definition_says(pool, kind, sizes, windows, given) -> None:
    stages = len(given["stages"])
    for rank, (worst, apart, turns) in enumerate(
        pool.run("tasks", "asynchronous", "llama4", kind, sizes, windows, given)
    ):
        assert worst < TOLERANCE, (rank, worst)
        assert apart > STALE, "the reference without staleness is as good: nothing was tested"
        assert turns == list(order_1f1b(rank // (4 // stages), stages, given["micro_batches"] * windows[-1]))


@pytest.mark.parametrize(
    ("model", "more", "facts"),
    [
        ("llama4", {"micro_batches": 2, "stages": (1, 1, 1, 1)}, ("training.micro_batches", 2, "pipeline = 4", 4)),
        (
            "llama4",
            {"micro_batches": 4, "interleave": 2, "stages": (2, 2)},
            ("training.interleave", 2, "schedule = pipedream_2bw", "interleave = 1"),
        ),
        ("llama4", {"micro_batches": 1}, ("schedule", "pipedream_2bw", 2, "pipeline = 1")),
    ],
)
def test_what_waits_for_all_stages_is_refused(model: str, more: dict[str, object], facts: tuple[object, ...]) -> None:
    plan = plans.hand_plan("zero1", model, plans.mesh_of(2), schedule="pipedream_2bw", **more)
    with refused(PlanFileError, *facts):
        bind(plan, plans.traced(model), plans.BATCH)
