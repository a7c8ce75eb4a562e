"""Blocks that share weights: the ways to store each multiply where all blocks agree on them, so each block has its part
of many, and what suits most blocks is tried for all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.errors import InfeasibleError
from planner.strategy_search.decomposition import cutting
from planner.strategy_search.result import SearchResult


class SharedLayer(nn.Module):
    """One layer that is called some times, as ALBERT's: blocks that share all weights."""

    def __init__(self, count: int, *, times: int = 3, width: int = 16) -> None:
        super().__init__()
        self.layer = nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = x + self.layer(x).relu()
        return x.square().mean()


def found_for(model: SharedLayer, *, devices: int = 2, **asked: Any) -> SearchResult:
    width = model.layer[0].in_features
    given = torch.ones(4, width, device="meta")
    return planner.search(model.to("meta"), "h100-80gb", args=(given,), devices=devices, **asked)


def test_eight_shared_weights_are_planned_and_read_again(tmp_path: Path) -> None:
    plan = found_for(SharedLayer(4), global_batch=4).plan
    (stage,) = plan.stages
    assert stage.blocks == 2  # and what is left of the first
    planner.save(plan, tmp_path / "plan.json")
    again = planner.estimate(tmp_path / "plan.json")
    assert again.prediction.step_seconds == pytest.approx(plan.prediction.step_seconds)


def test_more_weights_are_shared_than_arrays_have_axes() -> None:
    """Tensor parallelism leaves one way to store each of them."""
    plan = found_for(
        SharedLayer(17), global_batch=4, pinned={"tensor": 2, "micro_batches": 1, "recompute": "none"}
    ).plan
    assert [stage.blocks for stage in plan.stages] == [2]


def test_blocks_that_share_weights_are_recomputed_where_memory_asks_for_it() -> None:
    """No plan that keeps everything fits into the memory in which one that recomputes does."""
    model = SharedLayer(3, times=12, width=1024)
    asked = {"devices": 2, "global_batch": 65_536, "pinned": {"micro_batches": 1, "data": 2}}
    free = found_for(model, **asked).plan
    limit = 0.6 * max(stage.peak_bytes for stage in free.prediction.stages)
    with pytest.raises(InfeasibleError):
        found_for(model, memory_limit=limit, **{**asked, "pinned": {**asked["pinned"], "recompute": "none"}})
    plan = found_for(model, memory_limit=limit, **asked).plan
    assert max(stage.peak_bytes for stage in plan.prediction.stages) <= limit
    assert any(group.recomputation != "none" for group in plan.groups)


@pytest.mark.cases(1)
@pytest.mark.parametrize("limited", [False, True])
def test_what_is_proved_of_divided_weights_holds_for_weights_in_which_blocks_agree(
    limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four weights, so that all ways to store them can be looked at, too."""
    model, asked = SharedLayer(2, times=8, width=4096), {"devices": 2, "global_batch": 4096}
    if limited:
        free = found_for(model, **asked).plan
        asked["memory_limit"] = 0.97 * max(stage.peak_bytes for stage in free.prediction.stages)
    monkeypatch.setattr(cutting, "_JOINT", 10**6)
    joint = found_for(model, **asked).plan
    monkeypatch.setattr(cutting, "_JOINT", 0)
    divided = found_for(model, **asked).plan
    assert joint.provenance.gap is not None
    assert divided.provenance.gap is not None
    proved = [one.prediction.step_seconds * (1 - one.provenance.gap) for one in (joint, divided)]
    assert max(proved) <= min(one.prediction.step_seconds for one in (joint, divided)) * (1 + 1e-9)
    assert divided.prediction.step_seconds <= joint.prediction.step_seconds * 1.01
