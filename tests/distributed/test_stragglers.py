"""A rank that is slow is named at the end of a run: it is busy while the others wait for it."""

import pytest

PLANS = {
    "split": ((2, 2), {"micro_batches": 2}),
    "pipeline": ((2,), {"micro_batches": 2, "stages": (1, 1), "recomputation": "full"}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("plan", "where", "victim"), [
    ("split", "computing", 2), ("pipeline", "computing", 1), ("split", "reading", 0), ("pipeline", "computing", 2),
])  # fmt: skip
def test_the_slow_rank_is_named(pool, plan: str, where: str, victim: int) -> None:
    """It dawdles for 0.2 s in each step; what the others do besides takes milliseconds, but for a machine that is very
    busy: nothing is asked of them but to be less slow."""
    found = pool.run("tasks_stragglers", "run", *PLANS[plan], victim, where)
    for summary in found:
        assert summary["busy_seconds"] == found[0]["busy_seconds"], "all ranks know of all"
    slow = {one["rank"]: one["times"] for one in found[0]["slow"]}
    assert max(slow, key=slow.__getitem__, default=None) == victim, found[0]["busy_seconds"]
    assert found[0]["busy_seconds"][victim] >= 0.2
    assert found[0]["seconds"] >= 0.2, "the others take as long, and wait"
