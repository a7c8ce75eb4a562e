"""How much kernels count beside launches: by the quickest choice of all operators, found exactly."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from planner.api.searching import search
from planner.strategy_search.request.space import Configuration
from planner.strategy_search.tables.cost_table import CostTables, OperatorTable
from planner.strategy_search.tables.launches import kernels_share, least_seconds
from tests.unit.search.cases import make_case


def tables_of(model: str) -> CostTables:
    """Tables whose kernels do not wait for launches, on two devices."""
    tables = make_case(model, "h100-80gb", Configuration(pipeline=1, mesh=(2,), micro_batches=4), 8).chain.tables
    return replace(tables, operators=tuple(launched(table, 0.0) for table in tables.operators))


def launched(table: OperatorTable, seconds: float) -> OperatorTable:
    """An operator that a host takes so long to launch, of whose kernels none waits for that."""
    prices, size = table.prices, len(table.candidates.strategies)
    (there, back), host = prices.late, np.full(size, seconds)
    kernels = replace(
        prices,
        forward=prices.forward - there,
        backward=prices.backward - back,
        late=(np.zeros(size), np.zeros(size)),
        host=(host, host),
    )
    return replace(table, prices=kernels)


def quickest(tables: CostTables) -> float:
    """The least seconds of kernels and messages of the blocks in a row, every choice tried."""
    template, operators = tables.template, tables.operators
    own = [at for at in range(len(operators)) if at not in template.twins]
    place = {at: own.index(template.twins.get(at, at)) for at in range(len(operators))}
    blocks, best = template.blocks.count, np.inf
    for choice in itertools.product(*(range(len(operators[at].candidates.strategies)) for at in own)):
        seconds = 0.0
        for at, operator in enumerate(operators):
            prices, taken = operator.prices, choice[place[at]]
            every = (prices.forward, prices.backward, prices.inner_forward, prices.inner_backward)
            seconds += (blocks if template.in_block(at) else 1) * sum(float(each[taken]) for each in every)
        for table in tables.edges:
            edge, cell = table.edge, (choice[place[table.edge.producer]], choice[place[table.edge.consumer]])
            times = {"inside": blocks, "loop": blocks - 1, "enter": 1, "leave": 1, "outside": 1}[edge.kind]
            seconds += times * float(table.forward[cell] + table.backward[cell])
        best = min(best, seconds)
    return best


@pytest.mark.parametrize("model", ["perceptron", "chain", "single-2"])
def test_the_quickest_choice_is_found(model: str) -> None:
    tables = tables_of(model)
    found = least_seconds(tables.template, tables.operators, tables.edges)
    assert found == pytest.approx(quickest(tables), rel=1e-9)


def test_kernels_count_in_full_where_no_choice_is_as_quick_as_its_launches() -> None:
    tables = tables_of("chain")
    template = tables.template
    number = 2 * sum(template.times(at) for at in range(len(tables.operators)))  # of launches, in both passes
    least = least_seconds(template, tables.operators, tables.edges) / number
    for share, longer in ((0.999, True), (1.001, False)):
        operators = tuple(launched(table, share * least) for table in tables.operators)
        assert (kernels_share(template, operators, tables.edges) == 1.0) == longer


@pytest.mark.slow
def test_messages_that_every_plan_has_are_proved_of_all() -> None:
    """Statistics of batches are summed up in every layer: each can be without, but not all."""
    found = search("resnet50", "h100-80gb", devices=64, pinned={"pipeline": 1, "mesh": (64,), "micro_batches": 1})
    assert found.gap < 0.05
