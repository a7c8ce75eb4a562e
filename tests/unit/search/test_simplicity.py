"""Of plans that are nearly the fastest the simplest is preferred, and what is said of it is so."""

from dataclasses import replace

import pytest

from planner.errors import RequestError
from planner.plan.binding.bind import bind
from planner.plan.compare.verify import verify
from planner.plan.layout.decisions import decisions
from planner.plan.layout.roles import roles
from planner.report.search import simpler_text
from planner.strategy_search.engine.families import Shared
from planner.strategy_search.finalists.proofs import with_proof
from planner.strategy_search.objectives import plan_for
from planner.strategy_search.refinement.around import in_a_v
from planner.strategy_search.refinement.narrower import WIDE
from planner.strategy_search.refinement.simplicity import _all_like, _leanest, _Simplifier, with_simplicity
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.result import SearchResult
from planner.strategy_search.search import search
from tests.unit.plan.plans import plan_named
from tests.unit.search.cases import BATCH, cluster_of, request_of, traced

DEVICES = 16
TIGHT: dict[str, object] = {"pinned": Pinned(pipeline=2, mesh=(8,), micro_batches=4), "memory_limit": 2.69e9}
"""With 0.3% less memory all blocks alike are as fast as the fastest plan, and with 0.4% less nothing fits."""


def searched(share: float, **asked: object) -> SearchResult:
    request = request_of("llama-4", cluster_of("h100-80gb", DEVICES), 64, simplicity=share, **asked)
    return plan_for(request, lambda _: None, lambda: False)


def checked(result: SearchResult, share: float, fastest: SearchResult) -> int:
    """Whatever was preferred: it is legal, fits, costs what it says, and is simpler and no slower than was allowed. How
    many decisions it has."""
    plan, best = result.plan, fastest.plans[0]
    verdict = verify(plan, traced(plan.model.reference), BATCH, cluster_of("h100-80gb", DEVICES))
    assert verdict.as_stated, verdict.remarks
    assert verdict.fits
    if in_a_v(result.plans[0]) == in_a_v(best):
        assert result.bound_seconds == fastest.bound_seconds
    else:  # less is proved of stages in a V
        assert in_a_v(best) == (fastest.bound_seconds < result.bound_seconds)
    assert result.plans[0].seconds <= best.seconds * (1 + share)
    assert result.plan.prediction.peak_bytes <= result.limits[0]
    assert plan.provenance.gap == pytest.approx(result.gap, rel=1e-2, abs=1e-9)
    count = len(decisions(result.bound, roles(result.bound)))
    if result.simpler is None:
        assert plan == best.plan
        return count
    assert result.simpler.fastest.plan == best.plan
    assert len(result.simpler.decisions) == count < len(result.simpler.fastest_decisions)
    assert result.slower == pytest.approx(result.plans[0].seconds / best.seconds - 1)
    return count


@pytest.mark.slow
def test_all_blocks_like_the_leanest_are_a_legal_plan_of_one_group() -> None:
    plan = plan_named("several groups")
    sample = _leanest(plan)
    assert sample is not None
    changed = _all_like(plan, sample)
    assert len([group for group in plan.groups if group.blocks]) > 1
    (group,) = (group for group in changed.groups if group.blocks)
    assert (group.first_block, group.blocks, group.recomputation) == (0, 4, sample.recomputation)
    bound = bind(changed, traced("llama-4"), BATCH)
    assert len({bound.recompute_of(block) for block in range(4)}) == 1
    assert len(decisions(bound, roles(bound))) <= len(decisions(bind(plan, traced("llama-4"), BATCH), roles(bound)))
    assert _leanest(changed) is None


@pytest.mark.thorough
@pytest.mark.slow
def test_a_simpler_plan_is_preferred_within_the_share_and_never_beyond() -> None:
    """And what was decided by hand, and the limit of memory, hold in it."""
    fastest = searched(0.0, **TIGHT)
    assert fastest.simpler is None
    most = len(decisions(fastest.bound, roles(fastest.bound)))
    result = searched(0.5, **TIGHT)
    assert checked(result, 0.5, fastest) <= most
    assert (result.plan.pipeline, result.plan.training.micro_batches, result.plan.mesh.sizes) == (2, 4, (8,))
    assert result.simpler is not None or result.slower == 0  # a simpler one may be as fast


def test_where_a_gap_is_wide_simple_plans_are_tried_that_may_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wants no slower one for being simple. Where little is left to gain none is tried."""
    request = request_of("llama-4", cluster_of("h100-80gb", 2), 8, simplicity=0.0, pinned=Pinned(data=2))
    longest: list[float] = []
    monkeypatch.setattr(_Simplifier, "simplest", lambda self: longest.append(self.longest))
    found = search(request)
    for gap, tried in ((0.9 * WIDE, []), (1.1 * WIDE, [found.plans[0].seconds])):
        bound = found.plans[0].bounded * (1 - gap)
        wide = replace(found, plans=(with_proof(found.plans[0], bound, covered=True),), bound_seconds=bound)
        assert with_simplicity(request, wide, Shared()) is wide
        assert longest == tried


def test_shares_that_are_none_are_refused() -> None:
    def asked(share: float) -> SearchRequest:
        return request_of("llama-4", cluster_of("h100-80gb", DEVICES), 8, simplicity=share)

    for share in (-0.1, 1.0):
        with pytest.raises(RequestError, match=r"a share of the step time, from 0 to 0.5, as in 0.01 for 1%"):
            asked(share)


def test_what_is_said() -> None:
    assert simpler_text(0.004, 3, 9) == (
        "Simpler plan preferred: 3 decisions, 0.4% slower than the fastest plan found, which has 9 decisions;"
        " --simplicity 0 takes the fastest"
    )
    assert "as fast as the fastest plan" in simpler_text(0.0, 3, 9)
