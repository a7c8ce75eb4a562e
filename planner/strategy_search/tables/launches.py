"""How much kernels and messages count where hosts launch ahead of them; their launches count the rest.

A block takes as long as its kernels and messages K, or as its launches L: max(K, L), and no less than any mean of both.
Launches are the same under nearly every strategy, so the mean that proves most is at an end: K where no strategies have
K < L, else L. What every operator and every edge can do without by itself decides most cases. Where that is less than L
the least K is found by elimination, without parameters: strategies that save kernels pay for it with messages.

Where launches take longer kernels count a little all the same: they tell strategies apart.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from planner.strategy_search.request.template import Template
from planner.strategy_search.solvers.elimination.messages import eliminate, optimum
from planner.strategy_search.solvers.elimination.order import EXACT, schedule

if TYPE_CHECKING:
    from planner.strategy_search.tables.cost_table import EdgeTable, OperatorTable

Array = NDArray[np.float64]

_BESIDE = 0.05
"""Share of kernels and messages where launches take longer."""


def kernels_share(template: Template, operators: Sequence["OperatorTable"], edges: Sequence["EdgeTable"]) -> float:
    """The share with which kernels and messages count, and launches with the rest."""
    launches = sum(template.times(at) * float(_launches(table).min()) for at, table in enumerate(operators))
    nodes, sent = _seconds(template, operators, edges)
    if sum(float(table.min()) for table in (*nodes, *sent)) >= launches:
        return 1.0
    return 1.0 if _least(template, nodes, edges, sent) >= launches else _BESIDE


def least_seconds(template: Template, operators: Sequence["OperatorTable"], edges: Sequence["EdgeTable"]) -> float:
    """The least seconds of all kernels and messages, with all blocks of a kind alike; less where the model is too wide
    for that to be found."""
    nodes, sent = _seconds(template, operators, edges)
    return _least(template, nodes, edges, sent)


def _seconds(
    template: Template, operators: Sequence["OperatorTable"], edges: Sequence["EdgeTable"]
) -> tuple[list[Array], list[Array]]:
    """Seconds of kernels of every operator, and of messages of every edge, in the whole model."""
    nodes = [template.times(at) * _kernels(table) for at, table in enumerate(operators)]
    return nodes, [_times(template, table) * (table.forward + table.backward) for table in edges]


def _launches(table: "OperatorTable") -> Array:
    """Seconds that the host takes to launch an operator, in both passes."""
    first, second = table.prices.host
    return first + (second if table.prices.backward.any() else 0.0)


def _kernels(table: "OperatorTable") -> Array:
    """Seconds of the kernels of an operator, and of its own messages, in both passes, none waiting for its launch."""
    prices, (there, back) = table.prices, table.prices.late
    return prices.forward - there + prices.backward - back + prices.inner_forward + prices.inner_backward


def _times(template: Template, table: "EdgeTable") -> int:
    """How often an edge stands in the model: into blocks once from before them, and else from the block before."""
    edge = table.edge
    if edge.kind == "enter":
        return 1
    entered = (edge.consumer, edge.operand) in template.entered
    return template.times(edge.consumer) - (edge.kind == "loop" and entered)


def _least(template: Template, nodes: Sequence[Array], edges: Sequence["EdgeTable"], sent: Sequence[Array]) -> float:
    variable = [template.twins.get(at, at) for at in range(len(nodes))]
    tables = [node.copy() for node in nodes]
    for at, other in template.twins.items():
        tables[other] += nodes[at]
        tables[at] = np.zeros(1)
    pairs, between = list[tuple[int, int]](), list[Array]()
    for table, seconds in zip(edges, sent, strict=True):
        one, other = variable[table.edge.producer], variable[table.edge.consumer]
        if one == other:  # it reads its own result of the block before
            tables[one] += np.diagonal(seconds)
        else:
            pairs.append((one, other))
            between.append(seconds)
    plan = schedule(tuple(table.size for table in tables), tuple(pairs), (), EXACT)
    joined: dict[int, Array] = {}
    for (pair, flip), seconds in zip(plan.edge_pairs, between, strict=True):
        turned = seconds.T if flip else seconds
        joined[pair] = joined[pair] + turned if pair in joined else turned
    return optimum(eliminate(plan, [*tables, *(joined[pair] for pair in range(len(plan.pairs)))]))
