"""Sharding propagation: what the user has decided for some operators spreads to all others with the least
communication.

    decided      q_proj  b,o        as pinned
    the rest     whatever moves the least: redistributions forward and backward, gradients, gathered weights

Every operator takes part in one problem, which differs from any other search only in its weights: seconds of
communication count in full, those of computation hardly (they only decide between choices that move the same). This is
the semi-automatic mode of the GSPMD line of work (Xu et al. 2021) and of MindSpore's sharding propagation, solved
exactly, where those propagate greedily, operator by operator.
"""

import math
from collections import Counter
from dataclasses import replace

from hardware_profiles import Cluster
from planner.strategy_search.decomposition.chain import Chain
from planner.strategy_search.decomposition.cutting import cut
from planner.strategy_search.decomposition.pieces import Column
from planner.strategy_search.decomposition.setting import Setting
from planner.strategy_search.engine.assemble import Assembly, assembly, candidate, column_of, stored
from planner.strategy_search.engine.evaluation import Evaluation, check_virtual_stages
from planner.strategy_search.engine.outcome import Agreed, Outcome, ways_to_agree
from planner.strategy_search.request.restriction import Fixed
from planner.strategy_search.request.space import Running
from planner.strategy_search.tables.cost_table import CostTables, OperatorTable, ParameterTable

COMPUTATION = 1e-3
"""Weight of a second of computation relative to a second of communication."""


def propagated(
    tables: CostTables,
    setting: Setting,
    cluster: Cluster,
    recomputation: tuple[Running, ...],
    most_states: float = math.inf,
) -> Fixed | None:
    """The strategies that move the least and fit; None if none fit. All blocks of a kind take those that most of them
    have. Beyond `most_states` states of the boundary, pieces choose layouts of values that every block reads for
    themselves, and what most pieces choose is tried for all (`planner.strategy_search.decomposition.cutting`).

    Raises NothingAgreesError if virtual stages cannot hold equal blocks."""
    quiet = replace(
        tables,
        operators=tuple(_quiet(table) for table in tables.operators),
        parameters=tuple(_quiet_parameter(table) for table in tables.parameters),
    )

    def found(agreed: Agreed) -> tuple[Chain, Outcome]:
        chain = cut(
            quiet,
            cluster,
            recomputation=recomputation,
            stages=setting.ranks,
            agreed=dict(agreed),
            most_states=most_states,
        )
        check_virtual_stages(chain, setting)
        return chain, Evaluation(chain, setting).run()

    chain, outcome = found(())
    if outcome.ranks and chain.relaxed:
        tried = [found(way) for way in ways_to_agree(outcome, chain.relaxed)]
        chain, outcome = min(tried, key=lambda one: one[1].seconds)
    if not outcome.ranks:
        return None
    return fixed_of(assembly(chain, outcome.ranks, setting))


def fixed_of(found: Assembly) -> Fixed:
    """One strategy for every operator of the template: that of most blocks of its kind."""
    tables, blocks = found.tables, found.tables.template.blocks
    common: list[Column] = []
    for kind in range(len(blocks.firsts)):
        alike = [column for column, other in zip(found.blocks, blocks.kinds, strict=True) if other == kind]
        count = Counter(id(column) for column in alike)
        common.append(max(alike, key=lambda column: count[id(column)]))
    found = replace(found, blocks=tuple(common[kind] for kind in blocks.kinds))
    columns = (found.before, *common, found.after)
    return Fixed(
        operators=tuple(
            table.candidates.strategies[candidate(found, column_of(found, index), index)]
            for index, table in enumerate(tables.operators)
        ),
        parameters={table.name: stored(found, columns, table.name) for table in tables.parameters},
    )


def _quiet(table: OperatorTable) -> OperatorTable:
    prices = table.prices
    return replace(
        table,
        prices=replace(prices, forward=prices.forward * COMPUTATION, backward=prices.backward * COMPUTATION),
        again=None,
    )


def _quiet_parameter(table: ParameterTable) -> ParameterTable:
    prices = table.prices
    return replace(
        table,
        prices=replace(prices, accumulation=prices.accumulation * COMPUTATION, update=prices.update * COMPUTATION),
    )
