"""What the gather of an operand saves that products share with other operators: it depends on which products read the
layout that is gathered, and on their candidates."""

from dataclasses import replace

import numpy as np
import pytest

from planner.graph.blocks import IDENTITY
from planner.strategy_search.engine.families import all_configurations, engine_of
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.tables.products import place_of, products_of
from planner.strategy_search.tables.under_products import UnderProducts
from tests.unit.search.cases import cluster_of, request_of

WEIGHTS = ((1, 0), (0, 1), (1, 1), (2, 1))
"""How often the forward and the backward seconds may count."""


@pytest.mark.slow
def test_no_choice_saves_more_than_one_of_the_candidates_that_are_told_apart() -> None:
    """Not less than the candidates of products save that really read the layout, in any of 150 choices; and what
    products do not read saves nothing."""
    pinned = Pinned(pipeline=1, context=1, tensor=8, micro_batches=1, interleave=1)
    engine, _ = engine_of(request_of("few-experts", cluster_of("h100-80gb", 8), 8, pinned=pinned, precision="bf16"))
    configuration = next(iter(all_configurations(engine)))
    (tables,) = engine.store.tables(configuration)
    template, lists = tables.template, [one.candidates for one in tables.operators]
    edge = next(one for one in template.edges if lists[one.consumer].under is not None)
    assert template.graph.operators[edge.consumer].op == IDENTITY
    products, shared = products_of(template, edge), lists[edge.consumer]
    made = lists[edge.producer].results[place_of(template, edge)]
    builder = engine.store.builder(configuration, engine.groups[0])
    pricer = builder._edges.pricer
    under = UnderProducts(mesh=tables.mesh, cluster=builder.cluster, pricer=pricer)
    saved = under.saved(template, edge, made, lists)
    assert saved is not None
    leaving = {one.consumer: one for one in template.leaving[edge.consumer]}
    confined = [under.confined(template, leaving[at], lists) for at in products]
    assert shared.under is not None
    assert all(one is not None for one in confined)

    drawn, gains = np.random.default_rng(0), 0
    for _ in range(150):
        maker = int(drawn.integers(len(lists[edge.producer].strategies)))
        place = int(drawn.integers((shared.under == 0).sum()))
        chosen = [int(drawn.integers(len(lists[at].strategies))) for at in products]
        alone = lists.copy()
        alone[edge.consumer] = replace(shared.only(place), under=None)
        for at, choice in zip(products, chosen, strict=True):
            alone[at] = lists[at].only(choice)
        exact = under.saved(template, edge, made, alone)
        same = [at for at, strategy in enumerate(shared.strategies) if strategy == shared.strategies[place]]
        for forward, backward in WEIGHTS:
            told = [
                forward * saved.forward[maker, at]
                + backward * saved.backward[maker, at]
                - sum(
                    forward * one.forward[at, choice] + backward * one.backward[at, choice]
                    for one, choice in zip(confined, chosen, strict=True)
                    if one is not None
                )
                for at in same
            ]
            wanted = 0.0
            if exact is not None:
                wanted = forward * exact.forward[maker, 0] + backward * exact.backward[maker, 0]
            assert wanted - 1e-12 <= max(told)
            assert exact is not None or max(told) <= 1e-12
            gains += wanted > 0
    assert gains > 30
