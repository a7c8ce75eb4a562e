"""Copies in the memory of hosts: one may be lost, and at most one step is."""

from pathlib import Path

import pytest

CASES = {
    "dense": ("llama", (3, (2, 2), {})),
    "zero1": ("llama", ("zero1", (4,), {})),
    "zero3": ("llama", ("zero3", (4,), {})),
    "whole parameters": ("llama", ("whole", (4,), {"update": {"zero_by": "parameters"}})),
    "parameter servers": ("llama", ("whole", (4,), {"update": {"zero_by": "servers"}})),
    "padded": ("llama-odd", ("zero3", (4,), {"padded": (("*gate_proj.weight", 4),)})),
    "pipeline": ("llama4", (7, (2,), {"stages": (3, 1), "micro_batches": 4})),
    "mixture": ("mixture", (5, (2, 2), {})),
    "narrow with masters": ("llama", ("zero1", (4,), {"half": True})),
    "own parameters": ("llama", ("own norms", (4,), {"update": {"local_parameters": ("*norm*",)}})),
    "stale weights": ("llama4", (6, (2,), {"stages": (2, 2), "schedule": "pipedream_2bw", "micro_batches": 4})),
}


USUAL = ("zero3", "pipeline")


@pytest.mark.exhaustive
@pytest.mark.parametrize("per_host", [1, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in USUAL else pytest.mark.thorough) for case in CASES]
)
def test_any_host_may_be_lost(pool, tmp_path: Path, case: str, per_host: int) -> None:
    model, plan = CASES[case]
    gone = (len(case) % (4 // per_host),)
    found = pool.run("tasks_copies", "goes_on", model, plan, None, str(tmp_path), per_host, gone, "")
    for step, wanted, after, unequal in found:
        assert step == 3
        assert after == wanted
        assert unequal == []


@pytest.mark.thorough
def test_processes_alone_may_all_be_lost(pool, tmp_path: Path) -> None:
    for step, wanted, after, unequal in pool.run(
        "tasks_copies", "goes_on", *CASES["zero3"], None, str(tmp_path), 4, (), ""
    ):
        assert (step, after, unequal) == (3, wanted, [])
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "host-0").rglob("*")} == {0}, "for their owner alone"


@pytest.mark.exhaustive
def test_a_plan_for_other_degrees_goes_on(pool, tmp_path: Path) -> None:
    then = (3, (2,), {"stages": (3, 1), "micro_batches": 2})
    found = pool.run("tasks_copies", "goes_on", "llama4", ("zero3", (4,), {}), then, str(tmp_path), 2, (1,), "")
    for step, wanted, after, _ in found:
        assert step == 3
        assert after == pytest.approx(wanted, rel=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("damage", ["step-000003.rank-*.safetensors", "step-000003.rank-*.json"])
def test_one_step_is_lost_where_its_copy_is_not_whole(pool, tmp_path: Path, damage: str) -> None:
    """All ranks of one host: nobody else has what was in the file."""
    for step, wanted, after, unequal in pool.run(
        "tasks_copies", "goes_on", *CASES["zero3"], None, str(tmp_path), 4, (), damage
    ):
        assert (step, after, unequal) == (2, wanted, [])


@pytest.mark.thorough
def test_two_hosts_of_four_are_too_many(pool, tmp_path: Path) -> None:
    found = pool.run("tasks_copies", "goes_on", *CASES["zero3"], None, str(tmp_path), 1, (0, 1), "")
    assert [step for step, _, _, _ in found] == [None] * 4
