"""Stages of ZeRO share the tables of operators and edges, and edges their numbers: those that they would have alone."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.engines.spaces import SPACES
from planner.sharding.mesh import build_mesh
from planner.strategy_search.engine.families import Shared, all_configurations, engine_of
from planner.strategy_search.request.offload import ANYTHING
from planner.strategy_search.request.space import Configuration, Pinned
from planner.strategy_search.tables.table_builder import TableBuilder
from planner.strategy_search.within import within
from tests.property.test_engine_spaces import configurations, request_for
from tests.unit.search.cases import cluster_of, request_of, template_of

_CLUSTER = cluster_of("h100-80gb", 8)
_BUILT: dict[str, Any] = {
    "mesh": build_mesh(_CLUSTER, (2, 4)), "cluster": _CLUSTER, "precision": "bf16", "optimizer": "adamw",
    "together": True, "ahead": True, "overlapped": True, "exchanged": True,
}  # fmt: skip


def alike() -> list[list[Configuration]]:
    """Configurations for Megatron-LM that differ in their stage of ZeRO, on meshes of several axes."""
    found: dict[object, dict[int, Configuration]] = defaultdict(dict)
    for one in configurations("megatron"):
        assert one.decided is not None
        found[one.computed_alike, one.micro_batches].setdefault(one.decided.zero or 0, one)
    return [list(stages.values()) for stages in found.values() if len(stages) == 3]


@pytest.mark.slow
def test_tables_that_are_shared_are_those_that_are_built_alone() -> None:
    request = within(SPACES["megatron"], request_for("megatron"))
    (engine, _), groups = engine_of(request), alike()
    assert len(groups) > 10
    for first, *others in groups[:: len(groups) // 4]:
        (before,) = engine.store.tables(first)
        for other in others:
            (shared,), (alone,) = engine.store.tables(other), engine_of(request)[0].store.tables(other)
            assert shared.operators is before.operators
            assert [table.candidates.strategies for table in shared.operators] == [
                table.candidates.strategies for table in alone.operators
            ]
            for one, same in zip(shared.edges, alone.edges, strict=True):
                assert np.array_equal(one.forward, same.forward)
                assert np.array_equal(one.kept, same.kept)
            for mine, theirs in zip(shared.parameters, alone.parameters, strict=True):
                assert mine.stored == theirs.stored
                for use, its in zip(mine.uses, theirs.uses, strict=True):
                    assert np.array_equal(use.gather, its.gather)
                    assert np.array_equal(use.reduce, its.reduce)
            assert any(
                mine.stored != whole.stored for mine, whole in zip(shared.parameters, before.parameters, strict=True)
            )


@pytest.mark.parametrize("model", ["llama-4", "few-experts"])
def test_tables_with_offload_are_those_of_the_search_without_and_their_own_parameters(model: str) -> None:
    request, shared = request_of(model, _CLUSTER, 8, precision="bf16"), Shared()
    engine, _ = engine_of(request, shared)
    offloading = replace(request, pinned=Pinned(offload=ANYTHING))
    (other, _), (alone, _) = engine_of(offloading, Shared(alone=shared)), engine_of(offloading)
    for configuration in all_configurations(engine)[::40]:
        (before,), (tables,), (own,) = (one.store.tables(configuration) for one in (engine, other, alone))
        assert tables.operators is before.operators
        assert tables.edges is before.edges
        assert tables.shares == own.shares
        for one, same in zip(tables.operators, own.operators, strict=True):
            assert one.candidates.strategies == same.candidates.strategies
            assert np.array_equal(one.prices.forward, same.prices.forward)
        for edge, its in zip(tables.edges, own.edges, strict=True):
            assert np.array_equal(edge.forward, its.forward)
            assert np.array_equal(edge.backward, its.backward)
        assert any("host" in {one.state_home for one in parameter.stored} for parameter in tables.parameters)
        assert [parameter.stored for parameter in tables.parameters] == [each.stored for each in own.parameters]


class _Forgetful(dict[Any, Any]):
    """Finds nothing again."""

    def __contains__(self, key: object) -> bool:
        return False


@pytest.mark.parametrize("name", ["llama-4", "few-experts", "residual-mask", "kinds-one-before"])
def test_edges_that_join_the_same_share_their_numbers(name: str) -> None:
    template, shares = template_of(name), TableBuilder(**_BUILT)
    alone = TableBuilder(**_BUILT)
    alone._edges._edges = _Forgetful()
    alone._edges._under._saved = _Forgetful()
    edges, others = shares.build(template).edges, alone.build(template).edges
    assert len({id(one.kept) for one in edges}) < len({id(one.kept) for one in others}) == len(others)
    for one, other in zip(edges, others, strict=True):
        assert one.edge == other.edge
        for field in ("forward", "backward", "kept", "own"):
            assert np.array_equal(getattr(one, field), getattr(other, field))
        assert (one.later is None) == (other.later is None)
        if one.later and other.later:
            assert np.array_equal(one.later.seconds, other.later.seconds)
        assert (one.under is None) == (other.under is None)
        if one.under and other.under:
            assert all(map(np.array_equal, one.under, other.under))
