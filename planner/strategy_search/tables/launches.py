"""The shares with which kernels and collectives count if hosts launch ahead of them; launches count for the rest.

In a pass, a block takes as long as its kernels and collectives K, or as its launches L: max(K, L). That is at least any
weighted mean of K and L. In a pipeline, and with a single micro-batch, this holds for each pass of each block
separately, and for the operators outside of blocks: each can have its own share, and the sum of the means is a lower
bound. With several micro-batches the host continues to launch during a block with long kernels. All micro-batches but
the first then take as little as max(sum K, sum L) over all blocks and passes
(`planner.plan.prediction.step.further_ahead`). So a single share for everything gives a bound, and separate shares do
not.

Launches are the same under nearly every strategy, so the best bound is at one end: L if some strategies have K < L,
else K. Usually the sum of the least seconds of every operator and every edge settles this. If that sum is below L, the
strategies with the least total K are found by elimination, without parameters: strategies that save kernel time pay for
it with collectives.

Even where launches take longer, kernels keep a small share, to tell strategies apart.
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
"""The share of kernels and collectives where launches take longer."""


Shares: TypeAlias = Mapping[int | None, tuple[float, float]]
"""The shares of kernels and collectives in the forward and the backward pass, for each kind of block, and for operators
outside of blocks (None)."""


def kernels_shares(
    template: Template,
    operators: Sequence["OperatorTable"],
    edges: Sequence["EdgeTable"],
    parameters: Sequence["ParameterTable"] = (),
) -> tuple[Shares, Shares | None]:
    """One share for all passes and blocks; and separate shares, if these differ. Kernels that accumulate gradients of
    parameters belong to the backward pass of the first reader."""
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
    """A share is 1 where kernels and collectives take at least as long as launches: for everything together, and for
    each pass of each kind of block."""
    every = (
        1.0 if sum(one.sum() for one in kernels.values()) >= sum(one.sum() for one in launches.values()) else _BESIDE
    )
    longer = {kind: (seconds >= launches[kind]).tolist() for kind, seconds in kernels.items()}
    shares = {kind: (1.0 if there else _BESIDE, 1.0 if back else _BESIDE) for kind, (there, back) in longer.items()}
    return dict.fromkeys(kernels, (every, every)), shares


def least_counted(template: Template, operators: Sequence["OperatorTable"]) -> float:
    """The least seconds of a micro-batch that count for the launches of the whole model, however few samples it has."""
    hosts = (_launches(template, table, at) for at, table in enumerate(operators))
    passes = (one for both in hosts for one in (both if template.alive.trains else both[:1]))
    return (1 - _BESIDE) * math.fsum(float(one.min()) for one in passes)


def kernels_of(template: Template, operators: Sequence["OperatorTable"], edges: Sequence["EdgeTable"]) -> list[_Passes]:
    """Seconds of the kernels of all operators, and of the collectives of all edges, in the whole model."""
    nodes = (_kernels(template, table, at) for at, table in enumerate(operators))
    return [*nodes, *(_messages(template, table) for table in edges)]


def _by_kind(template: Template, places: Sequence[int], seconds: Sequence[_Passes]) -> dict[int | None, Array]:
    """Least seconds of the operators and edges at some places, in both passes, for all blocks of each kind."""
    found: dict[int | None, Array] = {kind: np.zeros(2) for kind in (*range(len(template.held)), None)}
    for at, both in zip(places, seconds, strict=False):
        found[template.kind_of(at)] += [one.min() for one in both]
    return found


def _accumulation(template: Template, table: "ParameterTable", seconds: Array) -> _Passes:
    """Seconds to accumulate the gradient of a parameter, in each pass, in the whole model."""
    return np.zeros(1), template.parameter_times(table.name) * seconds


def _launches(template: Template, table: "OperatorTable", at: int) -> _Passes:
    """Seconds that the host needs to launch an operator in all blocks of its kind, in each pass."""
    first, second = table.prices.host
    times = template.times(at)
    return times * first, times * (second if table.prices.backward.any() else np.zeros(1))


def _kernels(template: Template, table: "OperatorTable", at: int) -> _Passes:
    """Seconds of the kernels and collectives of an operator, in each pass, without waiting for launches."""
    prices, (there, back), times = table.prices, table.prices.late, template.times(at)
    forward, backward = prices.forward - there, prices.backward - back
    return times * (forward + prices.inner_forward), times * (backward + prices.inner_backward)


def _messages(template: Template, table: "EdgeTable") -> _Passes:
    """Seconds of the collectives of an edge, in each pass."""
    times = _times(template, table)
    return times * table.forward, times * table.backward


def _times(template: Template, table: "EdgeTable") -> int:
    """How often an edge occurs in the model: an edge from before the blocks enters them once; a loop edge is in every
    block but the one that is entered."""
    edge = table.edge
    if edge.kind == "enter":
        return 1
    entered = (edge.consumer, edge.operand) in template.entered
    return template.times(edge.consumer) - (edge.kind == "loop" and entered)


def of_cheapest(template: Template, seconds: Sequence[_Passes], edges: Sequence["EdgeTable"]) -> list[_Passes]:
    """The seconds of every operator and every edge under the strategies with the least total, where all blocks of a
    kind are alike. Approximate if the model is too wide for exact elimination."""
    count = len(seconds) - len(edges)
    variable = [template.twins.get(at, at) for at in range(count)]
    tables = [there + back for there, back in seconds[:count]]
    for at, other in template.twins.items():
        tables[other] = tables[other] + tables[at]
        tables[at] = np.zeros(1)
    pairs, between = list[tuple[int, int]](), list[Array]()
    for table, (there, back) in zip(edges, seconds[count:], strict=True):
        one, other = variable[table.edge.producer], variable[table.edge.consumer]
        if one == other:  # it reads its own result from the previous block
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
