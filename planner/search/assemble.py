"""From choices in tables to a plan: names for positions, factors for candidates, groups for stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.graph.blocks import BlockRun, block_parameters
from planner.graph.operator_graph import OperatorGraph
from planner.plan.plan import Group, Stage
from planner.search.cost_table import CostTables
from planner.sharding.layout import PARTIAL, REPLICATE, Layout, replicated
from planner.sharding.rule import strategy_names
from planner.sharding.rules import rule_of
from planner.sharding.stored import StoredParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """What was chosen for a run of equal stages:

    their blocks, candidates of the template's operators and parameters.
    """

    first_block: int
    blocks: int
    operators: Mapping[int, int]
    parameters: Mapping[str, int]


def groups_of(
    graph: OperatorGraph, blocks: BlockRun, tables: CostTables, choices: Sequence[StageChoice], recomputation: str
) -> tuple[Group, ...]:
    """The groups of a plan. `choices` are in the order of the stages and cover all blocks, which are recomputed
    alike."""
    found = [_outside(graph, blocks, tables, choices[0], "before the blocks" if blocks.count else "all", before=True)]
    if blocks.count:
        found += [_inside(graph, blocks, tables, choice, recomputation) for choice in choices]
        found.append(_outside(graph, blocks, tables, choices[-1], "after the blocks", before=False))
    return tuple(group for group in found if group.operators or group.parameters)


def _strategy(tables: CostTables, choice: StageChoice, index: int) -> tuple[str | None, ...]:
    graph = tables.template.graph
    candidate = choice.operators.get(index, 0)
    rule = rule_of(graph, graph.operators[index])
    return strategy_names(rule, tables.operators[index].candidates.strategies[candidate])


def _stored(tables: CostTables, choice: StageChoice, name: str) -> StoredParameter:
    for table in tables.parameters:
        if table.name == name and name in choice.parameters:
            return table.stored[choice.parameters[name]]
    copy = replicated(len(tables.mesh.axes))
    return StoredParameter(weight=copy, gradient=copy, state=copy)


def _outside(
    graph: OperatorGraph, blocks: BlockRun, tables: CostTables, choice: StageChoice, name: str, *, before: bool
) -> Group:
    stop = blocks.start if blocks.count else len(graph.operators)
    low, high = (0, stop) if before else (blocks.stop, len(graph.operators))
    shift = 0 if before else (blocks.count - 1) * blocks.period
    operators = tuple((graph.operators[at].name, _strategy(tables, choice, at - shift)) for at in range(low, high))
    own = {p for block in range(blocks.count) for p in block_parameters(graph, blocks, block)}
    parameters = []
    for parameter in graph.parameters:
        uses = graph.consumers.get(parameter.name, ())
        early = not uses or min(uses) < blocks.stop or not blocks.count
        if parameter.name not in own and early == before:
            parameters.append((parameter.name, _stored(tables, choice, parameter.name)))
    return Group(name=name, operators=operators, parameters=tuple(parameters))


def _inside(
    graph: OperatorGraph, blocks: BlockRun, tables: CostTables, choice: StageChoice, recomputation: str
) -> Group:
    low = blocks.start + choice.first_block * blocks.period
    operators = tuple(
        (graph.operators[low + at].name, _strategy(tables, choice, blocks.start + at)) for at in range(blocks.period)
    )
    names = zip(block_parameters(graph, blocks, choice.first_block), block_parameters(graph, blocks, 0), strict=True)
    last = choice.first_block + choice.blocks - 1
    return Group(
        name=f"block {choice.first_block}" if choice.blocks == 1 else f"blocks {choice.first_block} to {last}",
        first_block=choice.first_block,
        blocks=choice.blocks,
        recomputation=recomputation,
        operators=operators,
        parameters=tuple((name, _stored(tables, choice, twin)) for name, twin in names),
    )


def stages_of(count: int, blocks: BlockRun) -> tuple[Stage, ...]:
    """Equal stages; a model without repeated blocks has one stage."""
    share = blocks.count // count
    return tuple(Stage(first_block=index * share, blocks=share) for index in range(count))


def input_layouts(tables: CostTables, choices: Sequence[StageChoice]) -> tuple[tuple[str, Layout], ...]:
    """Every input is loaded in the layout in which its first consumer wants it."""
    graph = tables.template.graph
    found = []
    for name in graph.inputs:
        layout = replicated(len(tables.mesh.axes))
        for at in graph.consumers.get(name, ())[:1]:
            choice = choices[0] if at < tables.template.blocks.start else choices[-1]
            column = tables.operators[at].candidates.operands[graph.operators[at].operands.index(name)].forward
            wanted = column.distinct[column.index[choice.operators.get(at, 0)]]
            layout = tuple(REPLICATE if placement == PARTIAL else placement for placement in wanted)
        found.append((name, layout))
    return tuple(found)
