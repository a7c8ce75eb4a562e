"""The plan for decisions on every operator and parameter, as files of other engines list them.

    all decisions for one block            one way to run a block of its kind
    ways, one of each kind at a time       a search with these decisions, for what is left open
    blocks, each with its own way          the plan

In a search one block stands for all of its kind. So blocks that differ need as many searches as there are ways. The
first of these decides about operators outside of the blocks.
"""

import glob
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from planner.graph.blocks import Blocks, block_parameters
from planner.graph.operator_graph import OperatorGraph
from planner.plan.binding.bind import BoundPlan, prepare
from planner.sharding.layout import Layout
from planner.strategy_search.fixed.fixed_schedule import Order, around, arranged, blocks_like, without_limits
from planner.strategy_search.request.request import SearchRequest, Shard, Store

Decided = tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]
"""For an operator: factors by axis, cuts by operand (see `Shard`)."""
Stored = tuple[Layout, tuple[bool, ...]]
"""For a parameter: the layout of the weight, and the axes that shard its optimizer state (see `Store`)."""
Running = tuple[str, tuple[int, ...]]
"""For a block: what is recomputed (see `Group`), and the places in it of operators whose results are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByOperator:
    """Decisions, for the graph that plans refer to (`prepare`).

    Attributes:
        operators: by their place in the graph.
        parameters: by their name.
        order: stages and schedule.
        running: how every block is run.
    """

    operators: Mapping[int, Decided]
    parameters: Mapping[str, Stored]
    order: Order
    running: tuple[Running, ...]


@dataclass(frozen=True, slots=True)
class _Way:
    """The decisions for a block, by places in it."""

    kind: int
    operators: tuple[Decided | None, ...]
    parameters: tuple[Stored | None, ...]


def operator_plan(request: SearchRequest, decisions: ByOperator) -> BoundPlan:
    """The plan with these decisions, completed by the search and priced. It may not fit in memory.

    The request has the mesh and the pipeline in `pinned`. Raises RequestError if no plan agrees with the decisions.
    """
    graph, blocks = prepare(
        request.graph, request.imbalance, request.update.placed, request.fp8, once=request.tokens_once
    )
    ways = [_way(decisions, graph, blocks, block) for block in range(blocks.count)]
    of_kind = [list(dict.fromkeys(way for way in ways if way.kind == kind)) for kind in range(len(blocks.firsts))]
    found = [
        _found(request, decisions, graph, blocks, [known[min(at, len(known) - 1)] for known in of_kind])
        for at in range(max(map(len, of_kind), default=1))
    ]
    keys = [(found[of_kind[way.kind].index(way)], way, run) for way, run in zip(ways, decisions.running, strict=True)]
    inside, first = [], 0
    for _, equal in groupby(keys, key=lambda key: key[1:]):
        alike = list(equal)
        source, _, (recomputation, kept) = alike[0]
        inside.append(blocks_like(source, first, len(alike), recomputation, kept))
        first += len(alike)
    return arranged(request, found[0].plan, decisions.order, around(found[0], inside))


def _way(decisions: ByOperator, graph: OperatorGraph, blocks: Blocks, block: int) -> _Way:
    return _Way(
        blocks.kinds[block],
        tuple(decisions.operators.get(at) for at in blocks.operators(block)),
        tuple(decisions.parameters.get(name) for name in block_parameters(graph, blocks, block)),
    )


def _found(
    request: SearchRequest, decisions: ByOperator, graph: OperatorGraph, blocks: Blocks, ways: list[_Way]
) -> BoundPlan:
    """The plan with one way for all blocks of each kind."""
    inside = {at for block in range(blocks.count) for at in blocks.operators(block)}
    own = {name for block in range(blocks.count) for name in block_parameters(graph, blocks, block)}
    operators = {at: decided for at, decided in decisions.operators.items() if at not in inside}
    parameters = {name: stored for name, stored in decisions.parameters.items() if name not in own}
    for first, way in zip(blocks.firsts, ways, strict=True):
        names = block_parameters(graph, blocks, first)
        operators |= {
            at: one for at, one in zip(blocks.operators(first), way.operators, strict=True) if one is not None
        }
        parameters |= {name: one for name, one in zip(names, way.parameters, strict=True) if one is not None}
    shards = [
        Shard(pattern=glob.escape(graph.operators[at].name), strategy=axes, cuts=cuts)
        for at, (axes, cuts) in sorted(operators.items())
    ]
    stores = [Store(name=name, weight=weight, state=state) for name, (weight, state) in sorted(parameters.items())]
    return without_limits(replace(request, shards=tuple(shards), stores=tuple(stores)))
