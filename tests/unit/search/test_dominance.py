"""Stored layouts that are left out: whatever seconds and bytes are worth, one that stays is as good, and the first."""

import random
from dataclasses import fields

import numpy as np
import pytest
from numpy.typing import NDArray

from planner.pricing.parameter_price import ParameterPrices, Pricers, price_parameter
from planner.sharding.mesh import build_mesh
from planner.sharding.stored import legal_stored
from planner.strategy_search.tables.dominance import among, undominated
from tests.unit.search.cases import cluster_of, traced


@pytest.mark.parametrize("sizes", [(2, 4), (8,)])
def test_whatever_a_byte_is_worth_the_first_of_the_best_stays(sizes: tuple[int, ...]) -> None:
    cluster, draw = cluster_of("h100-80gb", 8), random.Random(0)
    mesh, graph = build_mesh(cluster, sizes), traced("llama-4")
    tensor = graph.types["model.layers.0.mlp.up_proj.weight"]
    stored = legal_stored(tensor.shape, mesh.sizes, True)
    prices = price_parameter(tensor, True, stored, "bf16", "adamw", Pricers.of(mesh, cluster))
    places = undominated(stored, prices)
    assert 0 < len(places) < len(stored)
    left = among(prices, places)
    kinds = [(one.weight, one.gradient) for one in stored]
    for _ in range(50):
        worth = {field.name: draw.choice((0.0, 1.0, draw.random())) for field in fields(prices)}
        for kind in set(kinds):
            here = [at for at, other in enumerate(kinds) if other == kind]
            kept = [at for at, place in enumerate(places) if kinds[place] == kind]
            whole, some = _cost(prices, worth)[here], _cost(left, worth)[kept]
            assert some.min() == whole.min()


def _cost(prices: ParameterPrices, worth: dict[str, float]) -> NDArray[np.float64]:
    return np.sum([share * getattr(prices, name) for name, share in worth.items()], axis=0)
