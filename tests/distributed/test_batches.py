"""Batches on real processes: what is computed across them, and data that goes on under another plan."""

import shutil
from pathlib import Path

import pytest

from runtime.checkpoint.opening import adopt_run


@pytest.mark.thorough
@pytest.mark.parametrize("full_batch", [True, False])
def test_what_looks_across_the_batch_looks_across_all_devices(pool, full_batch: bool) -> None:
    """The logic of one device, whoever reads which samples: never that of devices which see their own samples only."""
    for loss, one, local in pool.run("tasks_batches", "across", full_batch):
        assert loss == pytest.approx(one, rel=1e-5)
        assert abs(local - one) > 0.05 * one, "the two can be told apart"


def test_synthetic_batches_are_like_the_example_of_the_first_rank(pool) -> None:
    found = pool.run("tasks_batches", "drawn")
    assert all(each == found[0] for each in found)
    labels, *numbers = map(set, found[0])
    assert labels <= {0.0, 1.0}
    assert all(values <= {40, 50} for values in numbers)


@pytest.mark.exhaustive
def test_other_plans_go_on_with_the_same_samples(pool) -> None:
    """Data parallel, tensor parallel, and two stages; each from the position that any of them has saved."""
    plans = [("zero1", (4,), None, False), ("megatron", (2, 2), None, True), ("zero3", (2,), (1, 1), False)]
    found = [answer for plan in plans for answer in pool.run("tasks_batches", "goes_on", *plan)]
    assert all(state == found[0][1] for _, state in found)
    assert found[0][1]["samples"] == 4
    for (first, second), _ in found:
        assert [first, second] == pytest.approx(found[0][0], rel=1e-5)
    assert abs(found[0][0][0] - found[0][0][1]) > 1e-3, "another batch"


@pytest.mark.exhaustive
def test_runs_over_several_epochs_see_the_same_samples(pool, tmp_path: Path) -> None:
    """Each epoch in another order, the same one under two plans; and after a restart in the middle of the second epoch,
    also under a plan whose steps take twice as many."""

    def run(folder: str, plan: tuple[object, ...], steps: int) -> list[list[int]]:
        kind, sizes, batches, own = plan
        found = pool.run("tasks_epochs", "seen", kind, sizes, batches, steps, str(tmp_path / folder), own)
        assert all(each == found[0] for each in found)
        return found[0]

    wide, square, large = ("zero1", (4,), 1, False), ("zero3", (2, 2), 1, True), ("zero1", (4,), 2, False)
    whole = run("whole", wide, 12)
    for first, last in ((0, 4), (4, 8), (8, 12)):
        rows = [row for step in whole[first:last] for row in step]
        assert len(rows) == len(set(rows)) == 16, "an epoch has a sample once, and leaves out what makes no batch"
    assert whole[:4] != whole[4:8] != whole[8:]
    assert run("parts", square, 6) == whole[:6]
    shutil.copytree(tmp_path / "parts", tmp_path / "more")
    adopt_run(tmp_path / "more")  # else a copy does not go on
    assert run("parts", wide, 12) == whole[6:]
    assert run("more", large, 8) == [sorted(whole[6] + whole[7]), sorted(whole[8] + whole[9])]
