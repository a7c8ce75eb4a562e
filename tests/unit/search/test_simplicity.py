"""Of plans that are nearly the fastest the simplest is preferred, and what is said of it is so."""

import pytest

from planner.errors import RequestError
from planner.plan.compare.verify import verify
from planner.plan.layout.decisions import decisions
from planner.plan.layout.roles import roles
from planner.report.search import simpler_text
from planner.strategy_search.objectives import plan_for
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.result import SearchResult
from tests.unit.search.cases import BATCH, cluster_of, request_of, traced


def searched(share: float, model: str = "llama-4", **asked: object) -> SearchResult:
    request = request_of(model, cluster_of("h100-80gb", 16), 64, simplicity=share, **asked)
    return plan_for(request, lambda _: None, lambda: False)


def checked(result: SearchResult, share: float, fastest: SearchResult) -> None:
    """Whatever was preferred: it is legal, fits, costs what it says, and is simpler and no slower than was allowed."""
    plan, best = result.plan, fastest.plans[0]
    verdict = verify(plan, traced(plan.model.reference), BATCH, cluster_of("h100-80gb", 16))
    assert verdict.as_stated, verdict.remarks
    assert verdict.fits
    assert result.bound_seconds == fastest.bound_seconds
    assert result.plans[0].seconds <= best.seconds * (1 + share)
    assert plan.provenance.gap == pytest.approx(result.gap, rel=1e-2, abs=1e-9)
    count = len(decisions(result.bound, roles(result.bound)))
    if result.simpler is None:
        assert plan == best.plan
        return
    assert result.simpler.fastest.plan == best.plan
    assert len(result.simpler.decisions) == count < len(result.simpler.fastest_decisions)
    assert result.slower == pytest.approx(result.plans[0].seconds / best.seconds - 1)


@pytest.mark.slow
def test_a_simpler_plan_is_preferred_within_the_share_and_never_beyond() -> None:
    fastest = searched(0.0)
    assert fastest.simpler is None
    counts = []
    for share in (0.001, 0.05, 0.5):
        result = searched(share)
        checked(result, share, fastest)
        counts.append(len(decisions(result.bound, roles(result.bound))))
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < len(decisions(fastest.bound, roles(fastest.bound)))


@pytest.mark.slow
def test_what_was_decided_by_hand_holds_in_simpler_plans() -> None:
    pinned = Pinned(tensor=2, zero=1)
    fastest = searched(0.0, pinned=pinned)
    result = searched(0.5, pinned=pinned)
    checked(result, 0.5, fastest)
    found = roles(result.bound)
    assert (found.tensor, found.zero[:1]) == (2, "1")


@pytest.mark.slow
def test_a_tight_memory_is_kept_by_simpler_plans() -> None:
    """Some blocks are recomputed then; all of them, at most."""
    free = searched(0.0)
    limit = free.plan.prediction.peak_bytes * 0.995
    fastest = searched(0.0, memory_limit=limit)
    result = searched(0.5, memory_limit=limit)
    checked(result, 0.5, fastest)
    assert result.plan.prediction.peak_bytes <= result.limits[0]


def test_shares_that_are_none_are_refused() -> None:
    def asked(share: float) -> SearchRequest:
        return request_of("llama-4", cluster_of("h100-80gb", 16), 64, simplicity=share)

    for share in (-0.1, 1.0):
        with pytest.raises(RequestError, match=r"a share of the step time, from 0 to 0.5, as in 0.01 for 1%"):
            asked(share)


def test_what_is_said() -> None:
    assert simpler_text(0.004, 3, 9) == (
        "Simple by preference: 3 decisions, 0.4% slower than the fastest plan that was found, which takes 9;"
        " --simplicity 0 for that one"
    )
    assert "as fast as the fastest plan" in simpler_text(0.0, 3, 9)
