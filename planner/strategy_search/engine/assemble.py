"""From choices in tables to a plan: names for positions, factors for candidates, groups for equal blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from planner.graph.blocks import Blocks, block_parameters
from planner.graph.operator_graph import OperatorGraph
from planner.plan.plan import Group, Stage
from planner.sharding.layout import PARTIAL, REPLICATE, Layout, replicated
from planner.sharding.rule import strategy_names
from planner.sharding.rules import rule_of
from planner.sharding.stored import StoredParameter
from planner.strategy_search.decomposition.chain import Chain
from planner.strategy_search.decomposition.pieces import Column
from planner.strategy_search.decomposition.setting import Setting
from planner.strategy_search.engine.outcome import RankFilling
from planner.strategy_search.engine.uneven_stages import uneven_stages
from planner.strategy_search.request.template import Key
from planner.strategy_search.tables.cost_table import CostTables


@dataclass(frozen=True, kw_only=True, eq=False)
class Assembly:
    """All columns in the order of the model: the column before the blocks, every block, and the column after them.

    `chunks` has the number of blocks of every stage, including virtual stages, in the order of the model.
    """

    tables: CostTables
    alias: Mapping[Key, Key]
    before: Column
    blocks: tuple[Column, ...]
    after: Column
    chunks: tuple[int, ...]


def assembly(chain: Chain, ranks: Sequence[RankFilling], setting: Setting) -> Assembly:
    """Put what the ranks run into the order of the model, in virtual stages that hold equally many blocks, or are
    uneven."""
    head, tail = ranks[0].head, ranks[-1].tail
    assert head is not None
    blocks: list[Column] = [head] * chain.blocks_in_head
    rounds = zip(*(rank.of_chunks(setting.chunks) for rank in ranks), strict=True)
    stages = uneven_stages(chain, ranks, setting) if setting.uneven else [inner for one in rounds for inner in one]
    blocks += [column for inner in stages for column in inner]
    chunks = [len(inner) for inner in stages]
    chunks[0] += chain.blocks_in_head
    chunks[-1] += chain.blocks_in_tail
    if tail is not None:
        blocks += [tail] * chain.blocks_in_tail
    return Assembly(
        tables=chain.tables,
        alias=chain.alias,
        before=head,
        blocks=tuple(blocks),
        after=tail if tail is not None else head,
        chunks=tuple(chunks),
    )


def stages_of(found: Assembly) -> tuple[Stage, ...]:
    """The stages of a plan."""
    first, stages = 0, []
    for count in found.chunks:
        stages.append(Stage(first_block=first, blocks=count))
        first += count
    return tuple(stages)


def groups_of(graph: OperatorGraph, blocks: Blocks, found: Assembly) -> tuple[Group, ...]:
    """The groups of a plan: neighbouring blocks that are equal form one group."""
    groups = [_outside(graph, blocks, found, "before the blocks" if blocks.count else "all", before=True)]
    if blocks.count:
        first = 0
        signatures = [_signature(found, column, kind) for column, kind in zip(found.blocks, blocks.kinds, strict=True)]
        for _, equal in groupby(signatures):
            count = len(list(equal))
            groups.append(_inside(graph, blocks, found, first, count))
            first += count
        groups.append(_outside(graph, blocks, found, "after the blocks", before=False))
    return tuple(group for group in groups if group.operators or group.parameters)


def input_layouts(found: Assembly) -> tuple[tuple[str, Layout], ...]:
    """The layouts of the inputs: every input is loaded in the layout that its first consumer needs."""
    tables = found.tables
    graph = tables.template.graph
    layouts = []
    for name in graph.inputs:
        layout = replicated(len(tables.mesh.axes))
        for at in graph.consumers.get(name, ())[:1]:
            column = tables.operators[at].candidates.operands[graph.operators[at].operands.index(name)].forward
            wanted = column.distinct[column.index[candidate(found, column_of(found, at), at)]]
            layout = tuple(REPLICATE if placement == PARTIAL else placement for placement in wanted)
        layouts.append((name, layout))
    return tuple(layouts)


def column_of(found: Assembly, index: int) -> Column:
    """The first column that holds an operator of the template."""
    template = found.tables.template
    kind = template.kind_of(index)
    if kind is not None:
        return found.blocks[template.blocks.firsts[kind]]
    return found.before if not template.blocks.count or index < template.start else found.after


def candidate(found: Assembly, column: Column, index: int) -> int:
    """The candidate that a column chooses for an operator of the template."""
    return column.candidates.get(found.alias.get(index, index), 0)


def _signature(found: Assembly, column: Column, kind: int) -> tuple[object, ...]:
    """Everything that a block of a kind takes from its column."""
    template = found.tables.template
    alias, chosen = found.alias, column.candidates
    choice = tuple([chosen.get(alias.get(at, at), 0) for at in template.held[kind]])
    own = tuple([chosen.get(name, 0) for name in sorted(template.own_parameters[kind])])
    return kind, column.recompute, column.kept, column.home, choice, own


def _strategy(found: Assembly, column: Column, index: int) -> tuple[str | None, ...]:
    graph = found.tables.template.graph
    rule = rule_of(graph, graph.operators[index])
    strategies = found.tables.operators[index].candidates.strategies
    return strategy_names(rule, strategies[candidate(found, column, index)])


def stored(found: Assembly, columns: Sequence[Column], name: str) -> StoredParameter:
    """The stored layouts of a parameter, from the first column that holds it; replicated if none does."""
    key = found.alias.get(name, name)
    for column in columns:
        for table in found.tables.parameters:
            if table.name == name and key in column.candidates:
                return table.stored[column.candidates[key]]
    copy = replicated(len(found.tables.mesh.axes))  # nothing uses it
    return StoredParameter(weight=copy, gradient=copy, state=copy)


def _outside(graph: OperatorGraph, blocks: Blocks, found: Assembly, name: str, *, before: bool) -> Group:
    stop = blocks.start if blocks.count else len(graph.operators)
    low, high = (0, stop) if before else (blocks.stop, len(graph.operators))
    shift = 0 if before else blocks.stop - found.tables.template.stop
    column = found.before if before else found.after
    operators = tuple((graph.operators[at].name, _strategy(found, column, at - shift)) for at in range(low, high))
    own = {p for block in range(blocks.count) for p in block_parameters(graph, blocks, block)}
    parameters, count, end = [], blocks.count, blocks.stop
    for parameter in graph.parameters:
        if parameter.name in own:
            continue
        uses = graph.consumers.get(parameter.name, ())
        early = not uses or min(uses) < end or not count
        if early == before:
            columns = (column, *(found.blocks[first] for first in blocks.firsts))
            parameters.append((parameter.name, stored(found, columns, parameter.name)))
    return Group(name=name, operators=operators, parameters=tuple(parameters))


def _inside(graph: OperatorGraph, blocks: Blocks, found: Assembly, first: int, count: int) -> Group:
    """The group of `count` equal blocks that begins with block `first`."""
    column, kind = found.blocks[first], blocks.kinds[first]
    held = found.tables.template.held[kind]
    shift = blocks.borders[first] - held.start
    operators = tuple((graph.operators[at + shift].name, _strategy(found, column, at)) for at in held)
    twins = block_parameters(graph, blocks, blocks.firsts[kind])
    names = zip(block_parameters(graph, blocks, first), twins, strict=True)
    kept = tuple(graph.operators[at + shift].name for at in sorted(column.kept) if at in held)
    return Group(
        name=f"block {first}" if count == 1 else f"blocks {first} to {first + count - 1}",
        first_block=first,
        blocks=count,
        recomputation="none" if not column.recompute else "selective" if kept else "full",
        kept=kept,
        activations_home=column.home,
        operators=operators,
        parameters=tuple((name, stored(found, (column,), twin)) for name, twin in names),
    )
