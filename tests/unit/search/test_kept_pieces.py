"""Pieces of configurations are kept for those who ask again: of the last ones all, of others so many bytes."""

import pytest

from planner.strategy_search.engine import piece_store
from planner.strategy_search.engine.engine import Engine
from planner.strategy_search.engine.families import all_configurations, engine_of
from planner.strategy_search.engine.piece_store import KEPT
from planner.strategy_search.request.space import Configuration
from tests.unit.search.cases import cluster_of, request_of


def asked() -> tuple[Engine, list[Configuration]]:
    """An engine, and configurations of which no two have the same tables, more than it keeps all of."""
    engine, _ = engine_of(request_of("llama-4", cluster_of("h100-80gb", 4), 12))
    apart = {(one.priced_alike, one.micro_batches): one for one in all_configurations(engine)}
    found = list(apart.values())[: KEPT + 3]
    assert len(found) == KEPT + 3
    return engine, found


def test_pieces_that_are_asked_for_again_are_those_of_before() -> None:
    engine, configurations = asked()
    first = [engine.store.pieces(one, engine.gathers[0]) for one in configurations]
    assert all(one.nbytes > sum(chain.head[0].part.nbytes for chain in one.chains) for one in first)
    again = [engine.store.pieces(one, engine.gathers[0]) for one in configurations]
    assert all(one is other for one, other in zip(first, again, strict=True))


def test_of_those_asked_before_the_last_ones_so_many_bytes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_store, "_PIECES", 0)
    engine, configurations = asked()
    first = [engine.store.pieces(one, engine.gathers[0]) for one in configurations]
    for one, pieces in list(zip(configurations, first, strict=True))[-KEPT:]:
        assert engine.store.pieces(one, engine.gathers[0]) is pieces
    assert engine.store.pieces(configurations[0], engine.gathers[0]) is not first[0]
