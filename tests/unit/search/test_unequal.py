"""Unequal virtual stages around the best plan."""

from typing import Any

import pytest

import planner
from planner.strategy_search.result import SearchResult

MODEL = "llama3.2-1b+num_layers=16+vocab_size=36000"
"""Its head is as much work as 1.2 blocks."""


def searched(**pinned: Any) -> SearchResult:
    ranks = {"pipeline": 2, "mesh": (1,), "micro_batches": 4}
    return planner.search(
        MODEL,
        devices=2,
        seq_len=1024,
        global_batch=16,
        simplicity=0.0,
        pinned={**ranks, **pinned},
    )


@pytest.mark.slow
@pytest.mark.thorough
def test_the_head_of_more_work_than_a_block_is_in_a_stage_of_fewer_blocks() -> None:
    equal, free = searched(even=True), searched()
    assert len({stage.blocks for stage in equal.plan.stages}) == 1
    assert free.plan.stages[0].blocks > free.plan.stages[-1].blocks
    assert free.plans[0].seconds < 0.98 * equal.plans[0].seconds
    asked = searched(virtual_stages=free.plan.virtual_stages)
    assert free.plans[0].seconds <= asked.plans[0].seconds * (1 + 1e-9)
    assert not free.covered
    assert free.bound_seconds == equal.bound_seconds
    assert free.status == free.plan.provenance.status == "feasible"
    assert free.plan.provenance.gap == pytest.approx(free.gap, rel=1e-2, abs=1e-9)
