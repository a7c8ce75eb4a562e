"""Which layers of a plan are in fp8: what the candidates of its blocks say, the same in all blocks of a kind.

Columns of the same kind of block may have a layer in fp8 or not. Then all of them take the choice that takes less in
total, forward (twice if a block is recomputed) and backward. A choice counts as worse if a strategy has no candidate
for it.
"""

import math
from collections.abc import Iterator

from planner.graph.fp8 import Fp8, also_left_out
from planner.graph.operator_graph import OperatorGraph
from planner.strategy_search.decomposition.pieces import Column
from planner.strategy_search.engine.assemble import Assembly, candidate, column_of
from planner.strategy_search.request.fp8_layers import places_of


def chosen_layers(found: Assembly, prepared: OperatorGraph, fp8: Fp8) -> Fp8:
    """The layers in fp8 of a plan with these columns. In `prepared` all layers that the search decides about are in
    fp8."""
    template = found.tables.template
    plain: set[int] = set()
    for at in sorted(template.either):
        columns = list(_columns(found, at))
        narrow = found.tables.operators[at].candidates.narrow
        assert narrow is not None
        ways = {candidate(found, column, at) < narrow for column in columns}
        if ways == {False} or (len(ways) > 1 and not _pays(found, at, columns)):
            plain.update(places_of(template, template.blocks, at))
    return also_left_out(prepared, fp8, plain) if plain else fp8


def _columns(found: Assembly, at: int) -> Iterator[Column]:
    """The columns of all blocks that have an operator."""
    template = found.tables.template
    kind = template.kind_of(at)
    if kind is None:
        yield column_of(found, at)
        return
    yield from (column for column, other in zip(found.blocks, template.blocks.kinds, strict=True) if other == kind)


def _pays(found: Assembly, at: int, columns: list[Column]) -> bool:
    """Whether a layer takes less time in fp8, over all columns."""
    table, template = found.tables.operators[at], found.tables.template
    places = {way: place for place, way in enumerate(table.candidates.ways)}
    sums = {True: 0.0, False: 0.0}
    for column in columns:
        strategy = table.candidates.strategies[candidate(found, column, at)]
        again = column.recompute and at not in column.kept and template.works(at)
        for narrow in sums:
            place = places.get((strategy, narrow))
            seconds = math.inf
            if place is not None:
                forward = float(table.prices.forward[place] + table.prices.inner_forward[place])
                backward = float(table.prices.backward[place] + table.prices.inner_backward[place])
                seconds = (1 + again) * forward + backward
            sums[narrow] += seconds
    return sums[True] < sums[False]
