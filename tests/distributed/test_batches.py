"""Batches on real processes: what is computed across them, and data that goes on under another plan."""

import pytest


@pytest.mark.parametrize("full_batch", [True, False])
def test_what_looks_across_the_batch_looks_across_all_devices(pool, full_batch: bool) -> None:
    """The logic of one device, whoever reads which samples: never that of devices which see their own samples only."""
    for loss, one, local in pool.run("tasks_batches", "across", full_batch):
        assert loss == pytest.approx(one, rel=1e-5)
        assert abs(local - one) > 0.05 * one, "the two can be told apart"


def test_other_plans_go_on_with_the_same_samples(pool) -> None:
    """Data parallel, tensor parallel, and two stages; each from the position that any of them has saved."""
    plans = [("zero1", (4,), None, False), ("megatron", (2, 2), None, True), ("zero3", (2,), (1, 1), False)]
    found = [answer for plan in plans for answer in pool.run("tasks_batches", "goes_on", *plan)]
    assert all(state == found[0][1] for _, state in found)
    assert found[0][1]["samples"] == 4
    for (first, second), _ in found:
        assert [first, second] == pytest.approx(found[0][0], rel=1e-5)
    assert abs(found[0][0][0] - found[0][0][1]) > 1e-3, "another batch"
