"""Strategies of a plan, taken over as decisions for another search.

A plan lists each operator under its name in the first block of its group. A search has one block that stands for all,
so names from later groups are mapped to their twins in the first block. Where groups differ in a strategy, it is not
taken over, and the search decides.
"""

import glob
from collections.abc import Iterator, Mapping, Sequence

from planner.errors import RequestError, unknown_name
from planner.graph.operator_graph import OperatorGraph
from planner.matching import matches
from planner.plan.binding.apart import graph_of
from planner.plan.binding.bind import prepare
from planner.plan.plan import Plan
from planner.strategy_search.request.request import Shard


def listed_strategies(plan: Plan, pattern: str, traced: OperatorGraph) -> dict[str, tuple[str, ...]]:
    """Strategies of the operators in the plan that match the pattern (see `fnmatch`).

    The plan may leave operators out, and may be for another number of devices. Raises RequestError if it lists an
    operator that the model does not have, or none that matches.
    """
    if not plan.mesh.axes:
        raise RequestError("its mesh is one device, on which nothing is split; take a plan for more devices")
    taken: dict[str, set[tuple[str, ...]]] = {}
    for name, strategy in _listed(plan, traced):
        if matches(name, pattern):
            taken.setdefault(name, set()).add(tuple(factor or "-" for factor in strategy))
    if not taken:
        listed = [name for group in plan.groups for name, _ in group.operators]
        raise RequestError(f"it lists no operator that matches; {unknown_name('operator', pattern, listed)}")
    return {name: strategies.pop() for name, strategies in taken.items() if len(strategies) == 1}


def as_shards(strategies: Mapping[str, tuple[str, ...]], by_hand: Sequence[Shard]) -> tuple[Shard, ...]:
    """A decision for each operator, except those that are decided by hand already."""
    return tuple(
        Shard(pattern=glob.escape(name), strategy=strategy)
        for name, strategy in strategies.items()
        if not any(matches(name, shard.pattern) for shard in by_hand)
    )


def _listed(plan: Plan, traced: OperatorGraph) -> Iterator[tuple[str, tuple[str | None, ...]]]:
    """Operators of the plan under their names in the first block."""
    graph, blocks = prepare(graph_of(plan, traced))
    places = {op.name: at for at, op in enumerate(graph.operators)}
    for group in plan.groups:
        for name, strategy in group.operators:
            if name not in places:
                raise RequestError(f"it is a plan for another model: {unknown_name('operator', name, places)}")
            yield graph.operators[blocks.template(places[name])].name, strategy
