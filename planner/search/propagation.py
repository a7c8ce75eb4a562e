"""Sharding propagation: what the user has decided for some operators spreads to all others with the least traffic.

    decided      q_proj  b,o        as pinned
    the rest     whatever moves the least: redistributions forward and backward, gradients, weights gathered

Every operator takes part in one problem, the same as in any other search but for its weights: seconds of communication
count in full, those of computation hardly (they only decide between choices that move the same). This is the
semi-automatic mode of the GSPMD line of work (Xu et al. 2021) and of MindSpore's sharding propagation, solved exactly
where those propagate greedily, operator by operator.
"""

from collections import Counter
from dataclasses import replace

from hardware_profiles import Cluster
from planner.search.assemble import Assembly, assembly
from planner.search.cost_table import CostTables, OperatorTable, ParameterTable
from planner.search.cutting import cut
from planner.search.duals import Setting
from planner.search.evaluation import Evaluation
from planner.search.pieces import Column
from planner.search.restriction import Fixed
from planner.search.space import Running
from planner.sharding.layout import replicated
from planner.sharding.stored import StoredParameter

COMPUTATION = 1e-3
"""What a second of computation counts, beside a second of communication."""


def propagated(
    tables: CostTables, setting: Setting, cluster: Cluster, recomputation: tuple[Running, ...]
) -> Fixed | None:
    """The strategies that move the least and fit; None where none fit. Blocks all take those of the commonest kind."""
    quiet = replace(
        tables,
        operators=tuple(_quiet(table) for table in tables.operators),
        parameters=tuple(_quiet_parameter(table) for table in tables.parameters),
    )
    chain = cut(quiet, cluster, recomputation=recomputation, stages=setting.ranks)
    outcome = Evaluation(chain, setting).run()
    if not outcome.ranks:
        return None
    return fixed_of(assembly(chain, outcome.ranks, setting.chunks))


def fixed_of(found: Assembly) -> Fixed:
    """One strategy for every operator of the template: that of most blocks."""
    template = found.tables.template
    copy = replicated(len(found.tables.mesh.axes))
    nothing = StoredParameter(weight=copy, gradient=copy, state=copy)
    common: Column | None = None
    if found.blocks:
        count = Counter(id(column) for column in found.blocks)
        common = max(found.blocks, key=lambda column: count[id(column)])

    def column_of(index: int) -> Column:
        if template.in_block(index):
            assert common is not None
            return common
        return found.before if not template.blocks.count or index < template.blocks.start else found.after

    strategies = []
    for index, table in enumerate(found.tables.operators):
        key = found.alias.get(index, index)
        strategies.append(table.candidates.strategies[column_of(index).candidates.get(key, 0)])
    columns = [column for column in (found.before, common, found.after) if column is not None]
    stored = {}
    for parameter in found.tables.parameters:
        chosen = [c.candidates[parameter.name] for c in columns if parameter.name in c.candidates]
        stored[parameter.name] = parameter.stored[chosen[0]] if chosen else nothing
    return Fixed(operators=tuple(strategies), parameters=stored)


def _quiet(table: OperatorTable) -> OperatorTable:
    prices = table.prices
    return replace(
        table,
        prices=replace(prices, forward=prices.forward * COMPUTATION, backward=prices.backward * COMPUTATION),
    )


def _quiet_parameter(table: ParameterTable) -> ParameterTable:
    prices = table.prices
    return replace(
        table,
        prices=replace(prices, accumulation=prices.accumulation * COMPUTATION, update=prices.update * COMPUTATION),
    )
