"""Every schedule on real processes: loss and gradients equal the model's, the turns those that were simulated, and no
more micro-batches alive than were predicted."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

from costmodels import Turn, simulate
from planner.plan.binding.bind import bind
from planner.plan.prediction.predict import stage_costs
from planner.plan.prediction.step import ranks_seconds
from planner.plan.schedule import orders_of
from tests.contract.test_priced_is_emitted import Hand, cluster_of
from tests.distributed import plans
from tests.long_lists import first, pairs, rarely

TOLERANCE = 1e-5
SELECTIVE = {"recomputation": "selective", "kept": ("linear", "scaled_dot_product_attention", "gelu", "norm")}
FULL = {"recomputation": "full"}


def schedule(name: str, ranks: int) -> dict[str, object]:
    """What a plan for a model of four blocks says of a schedule on so many ranks."""
    given = {"schedule": name, "micro_batches": 2 * ranks, "global_batch": 8}
    if name in ("interleaved_1f1b", "zb_v", "dualpipe_v"):
        return {**given, "stages": (1, 1, 1, 1), "virtual_stages": 2}
    return {**given, "stages": (2, 2) if ranks == 2 else (1, 1, 1, 1)}


def in_a_v(name: str, ranks: int, micro_batches: int) -> dict[str, object]:
    """A schedule in a V for a model of eight blocks, not all of them in stages of equal size."""
    sizes = (1,) * 8 if ranks == 4 else (1, 2, 3, 2)
    return {
        "schedule": name, "stages": sizes, "virtual_stages": 2, "micro_batches": micro_batches,
        "global_batch": 2 * micro_batches,
    }  # fmt: skip


SCHEDULES = ("interleaved_1f1b", "zb_h1", "gpipe", "1f1b")
MODELS = {"llama4": "megatron", "gpt4": 3, "mixture4": 4}
"""Models of four blocks, one of them with experts, and how tensor parallelism inside a stage is planned for them: by
hand, or by a seed."""


def inside(model: str, name: str, tensor: int | str) -> list[Hand]:
    """Two ranks of two devices each: tensor parallelism, ZeRO and recomputation inside of a schedule."""
    given = schedule(name, 2)
    mesh = (1, 2) if tensor == "megatron" else (2,)
    return [
        Hand(model=model, kind=tensor, mesh=mesh, settings=given),
        Hand(model=model, kind="zero3", mesh=(2,), settings={**given, **FULL}),
        Hand(model=model, kind="zero2", mesh=(2,), settings={**given, **SELECTIVE}),
        Hand(model=model, kind="zero2", mesh=(2,), settings=given),
        Hand(model=model, kind="zero3", mesh=(2,), settings=given),
        Hand(model=model, kind=tensor, mesh=mesh, settings={**given, **FULL}),
        Hand(model=model, kind=tensor, mesh=mesh, settings={**given, **SELECTIVE}),
    ]


def some(cases: Iterable[tuple[Hand, bool]]) -> list[Any]:
    """The cases, of which those that are not needed for every pair of choices to meet are run rarely."""
    return [made for case, needed in cases for made in ([case] if needed else rarely([case]))]


FOUR = [
    case
    for at, (name, (model, tensor)) in enumerate(product(SCHEDULES, MODELS.items()))
    for case in first(
        int(at % 3 == at // 3 % 3),  # one model of each schedule
        some(
            (one, place == 0 or (at + place) % 3 == at // 3 % 3)
            for place, one in enumerate(inside(model, name, tensor))
        ),
    )
]
LINES = some(
    (Hand(model=model, kind="zero1", mesh=(), settings={**schedule(name, 4), **again}), needed)
    for (name, model, again), needed in pairs(SCHEDULES[1:], MODELS, ({}, FULL, SELECTIVE))
)
DEEP = [
    Hand(
        model="llama8",
        kind="zero1",
        mesh=(),
        settings={
            "schedule": "interleaved_1f1b",
            "stages": sizes,
            "virtual_stages": 2,
            "micro_batches": 8,
            "global_batch": 8,
            **again,
        },
    )
    for again, sizes in (({}, (1, 1, 2, 1, 1, 1, 1, 0)), (FULL, (0, 1, 1, 1, 1, 2, 1, 1)))
]
PAIRS = some(
    (Hand(model=model, kind="zero1", mesh=(), settings={**schedule(name, 2), **again}), needed)
    for (name, model, again), needed in pairs(SCHEDULES, MODELS, ({}, FULL, SELECTIVE))
)


RELAYS = [
    Hand(model="skipping", kind="zero3", mesh=(2,), settings={**schedule("interleaved_1f1b", 2), **FULL}),
    Hand(model="skipping", kind="zero1", mesh=(), settings=schedule("1f1b", 4)),
    Hand(model="skipping", kind=5, mesh=(2,), settings=schedule("gpipe", 2)),
    Hand(model="skipping", kind="zero2", mesh=(2,), settings={**schedule("zb_h1", 2), **FULL}),
    Hand(model="skipping", kind=6, mesh=(2,), settings={**schedule("interleaved_1f1b", 2), **SELECTIVE}),
    Hand(model="llama4", kind="zero2", mesh=(2,), settings={**schedule("eager_1f1b", 2), **FULL}),
]
"""A mask and a memory that all stages read; and transfers that 1F1B would wait for."""


def copied(model: str, kind: int | str, mesh: tuple[int, ...], **settings: object) -> Hand:
    """Two micro-batches of a turn, operator by operator."""
    given = {"micro_batches": 4, "global_batch": 8, "interleave": 2, **settings}
    return Hand(model=model, kind=kind, mesh=mesh, settings=given)


COPIES = some(
    (case, (at + place) % 3 != 2)
    for at, (model, tensor) in enumerate(MODELS.items())
    for place, case in enumerate(
        (
            copied(model, 7, (2, 2)),
            copied(model, tensor, (2,) if isinstance(tensor, int) else (1, 2), stages=(2, 2)),
            copied(model, "zero3", (4,), **FULL),
            copied(model, 8, (2, 2), **FULL),
            copied(model, 9, (2, 2), **SELECTIVE),
            copied(model, 10, (4,), interleave=4),
            copied(model, 11, (2,), stages=(2, 2), schedule="gpipe", **SELECTIVE),
            copied(model, 12, (2,), stages=(1, 1, 1, 1), schedule="interleaved_1f1b", virtual_stages=2, **FULL),
            copied(model, "zero2", (), stages=(1, 1, 1, 1), **FULL),
        )
    )
)


SEQUENCE = [
    copied("llama4", "sequence", (1, 2), stages=(2, 2)),
    copied("gpt4", "sequence", (1, 2), **FULL, stages=(2, 2)),
    copied("llama4", "sequence", (1, 4), interleave=4),
    copied("llama4", "sequence", (1, 2), **SELECTIVE, stages=(2, 2), schedule="gpipe"),
    copied("gpt4", "sequence", (2, 2)),
    copied("llama4", "sequence", (2, 2), **FULL),
]
"""With sequence parallelism, where they pause in the middle of products."""


def sliced(model: str, kind: int | str, mesh: tuple[int, ...], slices: int, **settings: object) -> Hand:
    """The sequence of a micro-batch in slices."""
    given = {"micro_batches": 2, "global_batch": 8, "schedule": "seqpipe", "slices": slices, "stages": (2, 2)}
    return Hand(model=model, kind=kind, mesh=mesh, settings={**given, **settings})


SLICES = some(
    (case, (at + place) % 3 != 2)
    for at, (model, tensor) in enumerate(MODELS.items())
    for place, case in enumerate(
        (
            sliced(model, tensor, (2,) if isinstance(tensor, int) else (1, 2), 2),
            sliced(model, 13, (2,), 4, **FULL),
            sliced(model, 14, (2,), 2, **SELECTIVE),
            sliced(model, "zero3", (2,), 4),
            sliced(model, "zero2", (2,), 2, **FULL),
            sliced(model, "zero1", (), 4, stages=(1, 1, 1, 1), micro_batches=4),
            sliced(model, "zero1", (), 2, stages=(1, 1, 1, 1), micro_batches=4, interleave=2),
            sliced(model, 15, (2,), 2, micro_batches=1),
            sliced(model, 16, (2,), 4, stages=(1, 1, 1, 1), virtual_stages=2, **FULL),
        )
    )
)


def compare(case: Hand, answers: list[tuple[float, list[Turn], int]]) -> None:
    """Each rank's error, turns and live micro-batches with what the plan predicts."""
    plan = case()
    bound = bind(plan, plans.traced(case.model), plans.BATCH)
    costs = stage_costs(bound, cluster_of(plan))
    ranks = ranks_seconds([cost.chunks for cost in costs], [cost.all_once for cost in costs], plan.schedule)
    timeline = simulate(ranks, orders_of(plan), v_shaped=plan.schedule_kind.v_shaped)
    for rank, (error, turns, live) in enumerate(answers):
        assert error < TOLERANCE, (rank, error)
        stage = rank // plan.mesh.size
        simulated = [
            Turn(event.kind, event.micro_batch, event.chunk, event.slice)  # type: ignore[arg-type]
            for event in sorted(timeline.events, key=lambda event: event.start)
            if (event.rank, event.stream) == (stage, "computation") and event.kind != "optimizer"
        ]
        assert turns == simulated
        assert live == timeline.ranks[stage].live * plan.training.interleave


V_SHAPED = [
    Hand(model="llama8", kind="zero1", mesh=(), settings=in_a_v("dualpipe_v", 4, 2)),
    Hand(model="mixture4", kind=4, mesh=(2,), settings=schedule("dualpipe_v", 2)),
    Hand(model="llama8", kind="zero1", mesh=(), settings=in_a_v("zb_v", 4, 6)),
    Hand(model="llama4", kind="zero3", mesh=(2,), settings={**schedule("zb_v", 2), **SELECTIVE}),
    Hand(model="llama8", kind="zero1", mesh=(), settings={**in_a_v("dualpipe_v", 4, 8), **FULL}),
    Hand(model="skipping", kind="zero3", mesh=(2,), settings={**schedule("zb_v", 2), **FULL}),
    Hand(model="gpt4", kind=3, mesh=(2,), settings=schedule("zb_v", 2)),
]
"""Two stages of a rank in a V; micro-batches as many as fill it, and fewer."""


@pytest.mark.cases(1, 2)
@pytest.mark.parametrize("case", [*first(1, V_SHAPED), *first(0, [])], ids=str)
def test_two_stages_of_a_rank_in_a_v(pool, case: Hand) -> None:
    compare(case, pool.run("tasks", "scheduled", case.model, case.kind, case.mesh, case.settings))


@pytest.mark.cases(1, 2)
@pytest.mark.parametrize(
    "case",
    [
        *FOUR,
        *first(1, LINES),
        *first(0, DEEP),
        *first(1, RELAYS),
        *first(2, COPIES),
        *first(1, SEQUENCE),
        *first(2, SLICES),
    ],
    ids=str,
)
def test_schedules_on_four_processes(pool, case: Hand) -> None:
    compare(case, pool.run("tasks", "scheduled", case.model, case.kind, case.mesh, case.settings))


@pytest.mark.cases(0, 3)
@pytest.mark.parametrize("case", first(0, PAIRS), ids=str)
def test_schedules_on_two_processes(pair, case: Hand) -> None:
    compare(case, pair.run("tasks", "scheduled", case.model, case.kind, case.mesh, case.settings))


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("more", [{"schedule": "seqpipe", "slices": 2}, {"interleave": 2}], ids=str)
def test_summed_gradients_are_those_of_all_micro_batches_and_pieces(pool, more: dict[str, object]) -> None:
    """Two pieces of each of two micro-batches, however a stage takes them."""
    settings = {"micro_batches": 2, "global_batch": 8, "stages": (2, 2), **more}
    for ratios in pool.run("tasks", "summed", "llama4", "zero1", (2,), settings):
        assert ratios == pytest.approx([4.0] * len(ratios), rel=1e-4)
