"""Values that every block reads (encoder output, position bias and mask of T5): where their layouts make too many
states, each piece chooses for itself, and what most of them choose is tried for all."""

from typing import Any

import numpy as np
import pytest

import planner
from hardware_profiles import Cluster
from planner.strategy_search.decomposition.cutting import cut
from planner.strategy_search.decomposition.lagrangian import Multipliers
from planner.strategy_search.engine import piece_store
from planner.strategy_search.engine.propagation import propagated
from planner.strategy_search.request.space import Configuration
from tests.unit.search.cases import make_case

FREE = 2**60
"""More states than any boundary has."""


@pytest.mark.parametrize("stages", [1, 2])
def test_pieces_that_choose_for_themselves_take_no_longer_and_as_long_where_they_agree(stages: int) -> None:
    case = make_case("read", "h100-80gb", Configuration(pipeline=stages, mesh=(2,), micro_batches=1), 4)
    joint = case.chain
    every = [key for key in joint.boundary if isinstance(key, int)][1:]
    assert len(every) == 2

    def values(**settings: Any) -> tuple[Any, Any]:
        chain = cut(joint.tables, case.cluster, recomputation=("none",), stages=stages, **settings)
        multipliers = Multipliers(chain, 1.0)
        multipliers.solve(1e-12, 2.0)  # memory has a price
        return chain, multipliers.value(multipliers.priced[0]) + chain.crossing.forward + chain.crossing.backward

    _, known = values()
    apart, least = values(most_states=1)
    assert set(apart.relaxed) == set(every)
    assert apart.shape == tuple(
        size for key, size in zip(joint.boundary, joint.shape, strict=True) if key not in apart.relaxed
    )
    axes = tuple(joint.boundary.index(key) for key in every)
    assert (least <= known.min(axis=axes) * (1 + 1e-12)).all()
    for way in ([0, 0], [1, 0], [1, 2]):
        agreed = dict(zip(every, way, strict=True))
        chain, together = values(most_states=1, agreed=agreed)
        assert not chain.relaxed
        at = tuple(slice(agreed[key], agreed[key] + 1) if key in agreed else slice(None) for key in joint.boundary)
        np.testing.assert_allclose(together, known[at], rtol=1e-12)


def test_decisions_spread_as_far_where_pieces_choose_for_themselves() -> None:
    case = make_case("read", "h100-80gb", Configuration(pipeline=1, mesh=(2,), micro_batches=1), 4)
    assert isinstance(case.cluster, Cluster)
    joint, apart = (propagated(case.chain.tables, case.setting, case.cluster, ("none",), most) for most in (FREE, 1))
    assert joint is not None
    assert apart == joint


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [{"mesh": (2, 2), "pipeline": 1}, {"mesh": (2,), "pipeline": 2}])
def test_t5_is_planned_as_well_as_with_all_states(mesh: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for most_states in (FREE, 1):
        monkeypatch.setattr(piece_store, "MOST_STATES", most_states)
        pinned: Any = {"micro_batches": 2, "recompute": "none", **mesh}
        found.append(planner.search("t5-tiny", "h100-80gb", devices=4, global_batch=8, pinned=pinned))
    joint, apart = found
    assert 0.99 * joint.bound_seconds <= apart.bound_seconds <= joint.bound_seconds * (1 + 1e-6)
    assert apart.plan.prediction.step_seconds <= joint.plan.prediction.step_seconds * 1.001
