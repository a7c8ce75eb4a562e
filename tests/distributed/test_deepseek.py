"""DeepSeek on processes: latent attention, dense blocks and then experts, whatever the plan."""

import pytest

from tests.long_lists import first, pairs, rarely

TOLERANCE = 1e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "sizes", "recomputation"),
    first(
        1,
        [
            ("deepseek", (2, 2), ("none", "full", "selective", "none")),
            ("deepseek", (4,), "none"),
            ("deepseek", (2, 2), "full"),
            ("deepseek-direct", (2, 2), "none"),
            ("deepseek-direct", (4,), "selective"),
        ],
    ),
    ids=str,
)
def test_random_plans(pool, model: str, sizes: tuple[int, ...], recomputation: str | tuple[str, ...]) -> None:
    """Heads, latent vectors, sequence, samples: anything that may be cut is."""
    seeds = list(range(4))
    for errors in pool.run("tasks", "parity", model, sizes, seeds, 1, recomputation):
        assert max(errors) < TOLERANCE, dict(zip(seeds, errors, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sizes", "stages", "kinds"),
    first(
        1,
        [
            ((2,), (1, 3), [0, "zero1"]),  # a dense block alone; another one with both that have experts
            ((2,), (3, 1), [0, "zero3"]),
            ((1,), (1, 1, 1, 1), [0, 1]),
        ],
    ),
    ids=str,
)
def test_stages_hold_blocks_of_any_kind(
    pool, sizes: tuple[int, ...], stages: tuple[int, ...], kinds: list[int | str]
) -> None:
    for errors, _ in pool.run("tasks", "pipelined", "deepseek", sizes, stages, kinds, 2, "none"):
        assert max(errors) < TOLERANCE, dict(zip(kinds, errors, strict=True))


APART = [("samples", 0), ("zero2", 0), ("zero3", 0)]
"""Ways to divide experts in which all devices split samples alone, with a stage of ZeRO of their own."""
TENSOR = ("tensor inside", "folded", "folded samples", "alone", "alone and exchanged")
"""Those in which the second axis splits heads, hidden units and the vocabulary of all else."""
HALVES = {"micro_batches": 2, "global_batch": 8}
DIVIDED = {
    "two": ([("folded", 2), ("zero2", 0)], {}),
    "with tensor": ([(way, zero) for way in TENSOR for zero in (0, 1, 2)], {}),
    "apart": ([*APART, ("folded", 1), ("folded samples", 2)], HALVES),
    "recomputed": ([*APART, *((way, 1) for way in TENSOR)], {**HALVES, "recomputation": "full"}),
    "partly recomputed": ([*APART, *((way, 2) for way in TENSOR)], {"recomputation": "selective"}),
    "block by block": ([("samples", 0), ("folded", 1)], {**HALVES, "recomputation": ("full", "selective", "none")}),
}
"""Ways with stages of ZeRO, and what else a plan says."""


WAYS = [
    ("deepseek", 4, "two"),
    *(("deepseek", 4, divided) for divided in list(DIVIDED)[1::2]),
    *(("deepseek-direct", 3, divided) for divided in list(DIVIDED)[::2]),
    *rarely(("deepseek", 4, divided) for divided in list(DIVIDED)[2::2]),
    *rarely(("deepseek-direct", 3, divided) for divided in list(DIVIDED)[1::2]),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "blocks", "divided"), first(1, WAYS))
def test_ways_to_divide_experts(pool, model: str, blocks: int, divided: str) -> None:
    """Experts over data parallel devices, folded on those that attention splits its heads on, or both."""
    ways, settings = DIVIDED[divided]
    if isinstance(words := settings.get("recomputation"), tuple):
        settings = {**settings, "recomputation": (*words, "full")[:blocks]}
    for errors in pool.run("tasks_experts", "latent", model, ways, (2, 2), settings):
        assert max(errors) < TOLERANCE, dict(zip(ways, errors, strict=True))


SIDES = {
    "folded": ((1, 2), [("folded", 0)]),
    "with tensor": ((1, 2), [("folded", 0), ("folded samples", 0), ("alone", 0)]),
    "over data": ((2, 1), [*(("tensor inside", zero) for zero in (0, 1, 2)), ("zero2", 0), ("samples", 0)]),
}
PIPELINES = [
    ("folded", "zb_h1", "full"),
    *(
        case if needed else rarely([case])[0]
        for case, needed in pairs(("with tensor", "over data"), ("1f1b", "zb_h1"), ("none", "full", "selective"))
    ),
]


@pytest.mark.cases(0, 0)
@pytest.mark.parametrize(("side", "schedule", "recomputation"), first(1, PIPELINES))
def test_experts_in_a_pipeline(pool, side: str, schedule: str, recomputation: str) -> None:
    """Dense blocks and one with experts on the first two devices, the last block on the others."""
    sizes, ways = SIDES[side]
    settings = {"schedule": schedule, "stages": (3, 1), "recomputation": recomputation, **HALVES}
    for errors in pool.run("tasks_experts", "latent", "deepseek", ways, sizes, settings):
        assert max(errors) < TOLERANCE, dict(zip(ways, errors, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [2, 4])
def test_decided_by_hand(request, processes: int) -> None:
    """Tensor, sequence, data and expert parallel, as the search plans them, on two and four processes."""
    from planner.plan.file import dump_plan
    from planner.strategy_search.request.space import Pinned
    from tests.distributed.searched import searched_plan

    whole = {"expert": 1, "micro_batches": 1}
    decided = (
        Pinned(tensor=processes, sequence_parallel=True, **whole),
        Pinned(tensor=2, zero=1, **whole),
        Pinned(data=processes, zero=3, recompute="full", **whole),
        Pinned(data=processes, zero=1, recompute="selective", **whole),
        Pinned(data=processes, expert=processes, zero=2, micro_batches=1),
    )
    found = [searched_plan("deepseek", processes, pinned=pinned) for pinned in decided]
    workers = request.getfixturevalue({2: "pair", 4: "pool"}[processes])
    for errors in workers.run("tasks_models", "parity", "deepseek", [dump_plan(plan) for plan in found]):
        assert max(errors) < TOLERANCE, errors
