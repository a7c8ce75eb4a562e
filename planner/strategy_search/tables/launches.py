"""How much kernels and messages count where hosts launch ahead of them; their launches count the rest.

A block takes in a pass as long as its kernels and messages K, or as its launches L: max(K, L), and no less than any
mean of both. In a pipeline, and with a single micro-batch, that is so of each pass of each block by itself, and of what
is in no block: every one has a share of its own, and the sum of the means is no more than what they take. A host that
has several micro-batches before it launches on behind a block with long kernels, so that all but the first take as
little as max(sum K, sum L) over all blocks and passes (`planner.plan.prediction.step.further_ahead`): there one share
for all of them proves something, and several do not.

Launches are the same under nearly every strategy, so the mean that proves most is at an end: K where no strategies have
K < L, else L. What every operator and every edge can do without by itself decides most cases. Where that is less than L
the strategies with the least K of all are found by elimination, without parameters: strategies that save kernels pay
for it with messages.

Where launches take longer kernels count a little all the same: they tell strategies apart.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from planner.strategy_search.request.template import Template
from planner.strategy_search.solvers.elimination.messages import backtrack, eliminate
from planner.strategy_search.solvers.elimination.order import EXACT, schedule

if TYPE_CHECKING:
    from planner.strategy_search.tables.cost_table import EdgeTable, OperatorTable, ParameterTable

Array = NDArray[np.float64]
_Passes = tuple[Array, Array]

_BESIDE = 0.05
"""Share of kernels and messages where launches take longer."""


Shares: TypeAlias = Mapping[int | None, tuple[float, float]]
"""The shares with which kernels and messages count in the forward and in the backward pass, of blocks of every kind and
of what is in none (None)."""


def kernels_shares(
    template: Template,
    operators: Sequence["OperatorTable"],
    edges: Sequence["EdgeTable"],
    parameters: Sequence["ParameterTable"] = (),
) -> tuple[Shares, Shares | None]:
    """One share for all passes and blocks, and a share for each, where these differ. Kernels that add up the gradients
    of parameters are in the backward pass of their first readers."""
    places = (*range(len(operators)), *(table.edge.consumer for table in edges))
    read = [table for table in parameters if table.uses]
    readers = [min(use.consumer for use in table.uses) for table in read]
    adding = [_accumulation(template, table, table.prices.accumulation) for table in read]
    added = [_accumulation(template, table, table.prices.launches) for table in read]
    hosts = [_launches(template, table, at) for at, table in enumerate(operators)]
    kernels = kernels_of(template, operators, edges)
    launches = _by_kind(template, (*range(len(operators)), *readers), [*hosts, *added])

    def shares(seconds: Sequence[_Passes]) -> tuple[Shares, Shares]:
        return _shares(_by_kind(template, (*places, *readers), [*seconds, *adding]), launches)

    together, apart = shares(kernels)
    if set(apart.values()) != {(1.0, 1.0)}:
        together, apart = shares(of_cheapest(template, kernels, edges))
    return together, apart if len({share for both in apart.values() for share in both}) > 1 else None


def _shares(kernels: Mapping[int | None, Array], launches: Mapping[int | None, Array]) -> tuple[Shares, Shares]:
    """Where kernels and messages take as long as launches they count: all together, and in each pass of each kind of
    block."""
    every = (
        1.0 if sum(one.sum() for one in kernels.values()) >= sum(one.sum() for one in launches.values()) else _BESIDE
    )
    longer = {kind: (seconds >= launches[kind]).tolist() for kind, seconds in kernels.items()}
    shares = {kind: (1.0 if there else _BESIDE, 1.0 if back else _BESIDE) for kind, (there, back) in longer.items()}
    return dict.fromkeys(kernels, (every, every)), shares


def least_counted(template: Template, operators: Sequence["OperatorTable"]) -> float:
    """What of the launches of the whole model counts for a micro-batch at least, however few samples it has."""
    hosts = (_launches(template, table, at) for at, table in enumerate(operators))
    passes = (one for both in hosts for one in (both if template.alive.trains else both[:1]))
    return (1 - _BESIDE) * math.fsum(float(one.min()) for one in passes)


def kernels_of(template: Template, operators: Sequence["OperatorTable"], edges: Sequence["EdgeTable"]) -> list[_Passes]:
    """Seconds of the kernels of all operators, and of the messages of all edges, in the whole model."""
    nodes = (_kernels(template, table, at) for at, table in enumerate(operators))
    return [*nodes, *(_messages(template, table) for table in edges)]


def _by_kind(template: Template, places: Sequence[int], seconds: Sequence[_Passes]) -> dict[int | None, Array]:
    """Least seconds of the operators and edges at some places, of both passes, of all blocks of each kind."""
    found: dict[int | None, Array] = {kind: np.zeros(2) for kind in (*range(len(template.held)), None)}
    for at, both in zip(places, seconds, strict=False):
        found[template.kind_of(at)] += [one.min() for one in both]
    return found


def _accumulation(template: Template, table: "ParameterTable", seconds: Array) -> _Passes:
    """Seconds of what adds up the gradient of a parameter, in each pass, in the whole model."""
    return np.zeros(1), template.parameter_times(table.name) * seconds


def _launches(template: Template, table: "OperatorTable", at: int) -> _Passes:
    """Seconds that the host takes to launch an operator of all blocks of its kind, in each pass."""
    first, second = table.prices.host
    times = template.times(at)
    return times * first, times * (second if table.prices.backward.any() else np.zeros(1))


def _kernels(template: Template, table: "OperatorTable", at: int) -> _Passes:
    """Seconds of the kernels of an operator, and of its own messages, in each pass, none waiting for its launch."""
    prices, (there, back), times = table.prices, table.prices.late, template.times(at)
    forward, backward = prices.forward - there, prices.backward - back
    return times * (forward + prices.inner_forward), times * (backward + prices.inner_backward)


def _messages(template: Template, table: "EdgeTable") -> _Passes:
    """Seconds of the messages of an edge, in each pass."""
    times = _times(template, table)
    return times * table.forward, times * table.backward


def _times(template: Template, table: "EdgeTable") -> int:
    """How often an edge stands in the model: into blocks once from before them, and else from the block before."""
    edge = table.edge
    if edge.kind == "enter":
        return 1
    entered = (edge.consumer, edge.operand) in template.entered
    return template.times(edge.consumer) - (edge.kind == "loop" and entered)


def of_cheapest(template: Template, seconds: Sequence[_Passes], edges: Sequence["EdgeTable"]) -> list[_Passes]:
    """What of the seconds of operators, and of edges behind them, the strategies take that take least in all, with all
    blocks of a kind alike; about that where the model is too wide for them to be found."""
    count = len(seconds) - len(edges)
    variable = [template.twins.get(at, at) for at in range(count)]
    tables = [there + back for there, back in seconds[:count]]
    for at, other in template.twins.items():
        tables[other] = tables[other] + tables[at]
        tables[at] = np.zeros(1)
    pairs, between = list[tuple[int, int]](), list[Array]()
    for table, (there, back) in zip(edges, seconds[count:], strict=True):
        one, other = variable[table.edge.producer], variable[table.edge.consumer]
        if one == other:  # it reads its own result of the block before
            tables[one] = tables[one] + np.diagonal(there + back)
        else:
            pairs.append((one, other))
            between.append(there + back)
    plan = schedule(tuple(table.size for table in tables), tuple(pairs), (), EXACT)
    joined: dict[int, Array] = {}
    for (pair, flip), both in zip(plan.edge_pairs, between, strict=True):
        turned = both.T if flip else both
        joined[pair] = joined[pair] + turned if pair in joined else turned
    tables = eliminate(plan, [*tables, *(joined[pair] for pair in range(len(plan.pairs)))])
    own = backtrack(plan, tables)
    choice = [own[one] for one in variable]
    of_operators = [(there[k], back[k]) for k, (there, back) in zip(choice, seconds[:count], strict=True)]
    ends = [(choice[table.edge.producer], choice[table.edge.consumer]) for table in edges]
    of_edges = [(there[k], back[k]) for k, (there, back) in zip(ends, seconds[count:], strict=True)]
    return [(np.asarray(there), np.asarray(back)) for there, back in (*of_operators, *of_edges)]
