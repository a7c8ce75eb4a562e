"""How much of the exchange of experts overlaps with other work of their block.

A plan splits up experts where that saves time (`planner.plan.layout.expert_overlap` has the rules,
`planner.plan.prediction.walk.exchange_overlap` the price). This file computes the most that each candidate can save, so
that layouts are chosen by the exposed time of the exchange, and objectives stay below step times:

    forward    min(r + w + r, k)                        r  rows, w  their weights, k  kernels that may run beside them
    backward   min(r + w + r, k' + g, min(r, k') + r + w)        ' backward, g  gradients of the experts' own matrices

A plan runs some of these kernels during dispatch, and the others during combine. In the backward pass, the gradients of
the matrices need the gradients of the experts' outputs, so they overlap only with the second all-to-all; the first one
overlaps with at most k'. If a plan divides k' into x + y, then min(r, x) + min(r + w, y + g) is at most each of the
three terms.

The kernels beside the experts count as if they were sharded as far as any candidate shards them. A plan in which they
take longer, since devices compute the same thing twice, may save more than this: nothing is proved about such plans.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hardware_profiles import Cluster
from planner.graph.fp8 import without_fp8
from planner.plan.layout.expert_overlap import tied_to
from planner.plan.prediction.walk.exchange_overlap import ways_of
from planner.pricing import OperatorPrices, price_operator
from planner.sharding.mesh import Mesh
from planner.sharding.rule import Rule, Strategy
from planner.sharding.rules import rule_of
from planner.sharding.rules.experts import matrices_of
from planner.strategy_search.request.template import Template
from planner.strategy_search.tables.candidates import Candidates

Array = NDArray[np.float64]


class Exchanged(NamedTuple):
    """Seconds that are saved in each pass, (K,) each."""

    forward: Array
    backward: Array


def saved_by_exchange(
    template: Template,
    index: int,
    candidates: Candidates,
    prices: OperatorPrices,
    beside: Sequence[OperatorPrices],
    mesh: Mesh,
    cluster: Cluster,
) -> Exchanged:
    """The seconds that overlap saves for the experts of an operator, under each candidate. `prices` are those of the
    operator; `beside` are those of the operators that may run at the same time."""
    graph = template.graph
    op = graph.operators[index]
    types = ([graph.types[name] for name in op.operands], [graph.types[n] for n in op.results if n is not None])
    matrices = matrices_of(rule_of(graph, op))
    graded = [gets and place not in matrices for place, gets in enumerate(graph.graded(op))]

    def priced(rule: Rule, strategies: Sequence[Strategy]) -> list[Array]:
        """Backward seconds without the gradients of the matrices; seconds of the gradients sent in the first and in the
        second exchange; (strategies,) each."""
        alone = price_operator(rule, strategies, *types, graded, mesh, cluster).backward
        ways = [ways_of(rule, strategy, mesh, cluster) for strategy in strategies]
        return [alone, np.array([one.sent for one in ways]), np.array([one.weighted for one in ways])]

    alone, first, second = _of_each(template, index, candidates, priced)
    forward = sum(float(one.forward.min()) for one in beside)
    backward = sum(float(one.backward.min()) for one in beside)
    covered = np.minimum(backward + prices.backward - alone, np.minimum(first, backward) + second)
    return Exchanged(
        forward=np.minimum(first + second, forward), backward=np.minimum(first + second, covered)
    )  # the forward pass sends as much


def whole_exchange(template: Template, index: int, candidates: Candidates, mesh: Mesh, cluster: Cluster) -> Exchanged:
    """All seconds of the exchange of experts, under each candidate: passes of another micro-batch may overlap with all
    of it."""

    def priced(rule: Rule, strategies: Sequence[Strategy]) -> list[Array]:
        ways = [ways_of(rule, strategy, mesh, cluster) for strategy in strategies]
        return [np.array([one.there + one.rows for one in ways]), np.array([one.sent + one.weighted for one in ways])]

    forward, backward = _of_each(template, index, candidates, priced)
    return Exchanged(forward=forward, backward=backward)


def _of_each(
    template: Template,
    index: int,
    candidates: Candidates,
    priced: Callable[[Rule, Sequence[Strategy]], list[Array]],
) -> list[Array]:
    """The result of `priced` for every candidate; some candidates may compute without fp8."""
    graph = template.graph
    op = graph.operators[index]
    some, strategies, rule = candidates.narrow, candidates.strategies, rule_of(graph, op)
    if some is None:
        return priced(rule, strategies)
    both = [priced(rule_of(graph, without_fp8(op)), strategies[some:])]
    both = [priced(rule, strategies[:some]), *both] if some else both
    return [np.concatenate(parts) for parts in zip(*both, strict=True)]


def beside_experts(template: Template, index: int) -> tuple[int, ...]:
    """The operators of the block that neither make inputs of the experts nor read their outputs."""
    graph, kind = template.graph, template.kind_of(index)
    if kind is None:
        return ()
    inside = template.held[kind]
    tied = tied_to(graph, index, inside)
    return tuple(at for at in inside if at != index and at not in tied)
