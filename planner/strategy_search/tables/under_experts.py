"""The exchange of experts, as far as it travels under other work of their block.

A plan takes experts apart where that saves time (`planner.plan.layout.expert_overlap` has the rules,
`planner.plan.prediction.exchange_overlap` the price). Here it is what each candidate saves at most, so that layouts are
chosen for what an exchange takes in the end, and sums stay below steps:

    forward    min(r + w + r, k)                        r  rows, w  their weights, k  the kernels that may run beside
    backward   min(r + w + r, k' + g, min(r, k') + r + w)        ' backward, g  gradients of the experts' own matrices

A plan has some of the kernels beside the rows on one way, the others beside those on the other. Gradients of the
matrices are made when those of what the experts make are there: they cover the second way alone, so that what goes
there first is covered by no more than k'. However a plan divides k' into x + y, min(r, x) + min(r + w, y + g) is no
more than each of the three.

The kernels beside the experts count as if they were cut over devices as far as any candidate cuts them. A plan in which
they take longer, as devices compute the same twice, may save more than is known here: no bound is proved of such.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hardware_profiles import Cluster
from planner.graph.fp8 import without_fp8
from planner.plan.layout.expert_overlap import tied_to
from planner.plan.prediction.exchange_overlap import ways_of
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
    """What the experts of an operator save under each candidate, whose prices are known, as are those of what may run
    `beside` them."""
    graph = template.graph
    op = graph.operators[index]
    types = ([graph.types[name] for name in op.operands], [graph.types[n] for n in op.results if n is not None])
    matrices = matrices_of(rule_of(graph, op))
    graded = [name in graph.differentiable and place not in matrices for place, name in enumerate(op.operands)]

    def priced(rule: Rule, strategies: Sequence[Strategy]) -> list[Array]:
        """Seconds backward but for the gradients of the matrices, and of gradients that are sent there and back,
        (strategies,) each."""
        alone = price_operator(rule, strategies, *types, graded, mesh, cluster).backward
        ways = [ways_of(rule, strategy, mesh, cluster) for strategy in strategies]
        return [alone, np.array([one.sent for one in ways]), np.array([one.weighted for one in ways])]

    alone, first, second = _of_each(template, index, candidates, priced)
    forward = sum(float(one.forward.min()) for one in beside)
    backward = sum(float(one.backward.min()) for one in beside)
    covered = np.minimum(backward + prices.backward - alone, np.minimum(first, backward) + second)
    return Exchanged(
        forward=np.minimum(first + second, forward), backward=np.minimum(first + second, covered)
    )  # as much is sent forward


def whole_exchange(template: Template, index: int, candidates: Candidates, mesh: Mesh, cluster: Cluster) -> Exchanged:
    """What the experts of an operator exchange at all under each candidate: passes of another micro-batch may cover
    it."""

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
    """What is `priced` of every candidate, of which some may compute without fp8."""
    graph = template.graph
    op = graph.operators[index]
    some, strategies, rule = candidates.narrow, candidates.strategies, rule_of(graph, op)
    if some is None:
        return priced(rule, strategies)
    both = [priced(rule_of(graph, without_fp8(op)), strategies[some:])]
    both = [priced(rule, strategies[:some]), *both] if some else both
    return [np.concatenate(parts) for parts in zip(*both, strict=True)]


def beside_experts(template: Template, index: int) -> tuple[int, ...]:
    """What neither makes what experts read nor reads what they make, in their block."""
    graph, kind = template.graph, template.kind_of(index)
    if kind is None:
        return ()
    inside = template.held[kind]
    tied = tied_to(graph, index, inside)
    return tuple(at for at in inside if at != index and at not in tied)
