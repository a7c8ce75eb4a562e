"""Operators that every data-parallel replica computes by itself, against modules that do so by hand."""

from typing import Any

import pytest

TOLERANCE = 1e-4
APART = 1e-2


def worst(ranks, *arguments: Any) -> tuple[float, float]:
    found = ranks.run("tasks_per_replica", "parity", *arguments)
    return max(error for error, _ in found), min(whole for _, whole in found)


@pytest.mark.slow
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("pattern", "replicas", "pinned", "full_batch"),
    [
        ("*bn*", 4, {"data": 4, "micro_batches": 1}, False),
        ("*", 4, {"data": 4, "micro_batches": 2}, True),
        ("centre", 4, {"data": 2, "tensor": 2, "micro_batches": 2}, None),
        ("*", 4, {"data": 2, "pipeline": 2, "micro_batches": 2}, None),
        ("*", 2, {"data": 2, "tensor": 2, "micro_batches": 1}, None),
        ("*bn*", 4, {"data": 2, "tensor": 2, "micro_batches": 2}, False),
        ("centre", 2, {"mesh": (2, 2), "micro_batches": 2}, None),
        ("*", 8, {"data": 4, "zero": 3, "recompute": "full", "micro_batches": 1}, True),
        ("*", 4, {"data": 1, "tensor": 2, "pipeline": 2, "micro_batches": 2}, None),
    ],
)
def test_four_processes_compute_what_replicas_do(
    pool, pattern: str, replicas: int, pinned: dict[str, Any], full_batch: bool | None
) -> None:
    """As many replicas as data parallelism has, more of them, or fewer; with tensor parallelism, stages, recomputation;
    a dataset that is read whole, or cut."""
    error, whole = worst(pool, pattern, replicas, pinned, full_batch)
    assert error < TOLERANCE
    assert whole > APART, "it can be told from the whole batch"


@pytest.mark.slow
@pytest.mark.cases(1, 2)
@pytest.mark.parametrize(
    ("pattern", "pinned", "full_batch"),
    [
        ("*", {"data": 2, "micro_batches": 2, "recompute": "none"}, False),
        ("*bn*", {"data": 2, "micro_batches": 1}, True),
        ("centre", {"data": 2, "micro_batches": 2}, None),
    ],
)
def test_two_processes_compute_what_replicas_do(
    pair, pattern: str, pinned: dict[str, Any], full_batch: bool | None
) -> None:
    error, whole = worst(pair, pattern, 2, pinned, full_batch)
    assert error < TOLERANCE
    assert whole > APART
