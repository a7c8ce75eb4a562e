"""Training stacks that overlap a share of their communication: sums count it as free, so that what is proved of plans
in one stage is about steps."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hardware_profiles import Hidden, load_software
from planner.plan.binding.bind import BoundPlan
from planner.strategy_search.engine.contenders import Contender
from planner.strategy_search.engine.outcome import RankFilling
from planner.strategy_search.finalists.plan_maker import PlanMaker
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.search import search
from tests.unit.search.cases import cluster_of, request_of

ALL = 1 + 1e-9


@pytest.mark.cases(2)
@pytest.mark.parametrize("stack", ["fsdp", "nemo", "internevo"])
def test_no_step_of_one_stage_is_shorter_than_its_sum(stack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all plans of all meshes and micro-batches."""
    made, steps = PlanMaker.made, list[tuple[float, float]]()

    def noted(self: PlanMaker, found: Contender, ranks: Sequence[RankFilling]) -> BoundPlan:
        bound = made(self, found, ranks)
        if ranks == found.outcome.ranks:
            steps.append((found.objective, bound.plan.prediction.step_seconds))
        return bound

    monkeypatch.setattr(PlanMaker, "made", noted)
    cluster = cluster_of("a100-80gb", 8).with_software(load_software(stack))
    assert cluster.software.hidden != Hidden()
    request = request_of("llama-2", cluster, 8, precision="bf16", pinned=Pinned(pipeline=1))
    found = search(replace(request, top=8, prune=False))
    assert found.assumed == ()
    assert len(steps) >= 8
    assert all(summed <= step * ALL for summed, step in steps)
    assert found.bound_seconds <= min(step for _, step in steps) * ALL
