"""DeepSeek on processes: latent attention, dense blocks and then experts, whatever the plan."""

import pytest

from tests.long_lists import first

TOLERANCE = 1e-5


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


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [2, 4])
def test_decided_by_hand(request, processes: int) -> None:
    """Tensor, sequence and data parallel, as the search plans them, on two and four processes."""
    from planner.plan.file import dump_plan
    from planner.search.space import Pinned
    from tests.distributed.searched import searched_plan

    whole = {"expert": 1, "micro_batches": 1}  # an exchange of rows is not executed
    decided = (
        Pinned(tensor=processes, sequence_parallel=True, **whole),
        Pinned(tensor=2, zero=1, **whole),
        Pinned(data=processes, zero=3, recompute="full", **whole),
        Pinned(data=processes, zero=1, recompute="selective", **whole),
    )
    found = [searched_plan("deepseek", processes, pinned=pinned) for pinned in decided]
    workers = request.getfixturevalue({2: "pair", 4: "pool"}[processes])
    for errors in workers.run("tasks_models", "parity", "deepseek", [dump_plan(plan) for plan in found]):
        assert max(errors) < TOLERANCE, errors
