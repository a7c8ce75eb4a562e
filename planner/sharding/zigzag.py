"""Zigzag order: how a sequence is cut so that causal attention is the same work on every device of a ring.

    2 n chunks on n = 4 devices    0 1 2 3 4 5 6 7      device i has the chunks i and 2 n - 1 - i
    device                         0 1 2 3 3 2 1 0      every device meets as many keys as any other

The order is one of pieces, not of tensors: whole tensors are always in natural order, and a redistribution between a
whole tensor and one that is cut on such an axis reorders it. So positions, masks, labels and losses need to know
nothing of it. Where a zigzag axis cuts what other axes have cut before it, it cuts the piece that they have left.

An axis cuts *sequences* in its order and all other dims in contiguous pieces. Sequences are found here: they start at
the dims of queries and keys that a ring splits, and follow the rules through the graph in both directions:

    attention  b g q d         q ─ a sequence           a dim and a loop that have the same steps are one
    flatten    b q -> (b q)    the inner q of (b q)     of a compound dim, the steps say which part it is
    loss       n v, n ->       n = (b q), as a whole    a loop that has the sequence inside of it

A loop is cut alike in all tensors that it indexes. So an operator may split a loop on such an axis only where all dims
of the loop are sequences, or none is; sums, elementwise work and lookups do not depend on the order of their loop.
Parameters have no order: a parameter that a sequence indexes (learned positions added as they are) may not be cut along
it.

Zigzag order is that of Llama 3 (Grattafiori et al. 2024, arXiv 2407.21783, section 3.3.2) and of striped variants of
ring attention (Brandon et al. 2023, arXiv 2311.09431), which balance a causal mask in another way.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from planner.errors import LayoutError, StrategyError
from planner.faults import Fault
from planner.graph.operator_graph import OperatorGraph
from planner.nearest import multiples, nearest_words
from planner.sharding.mesh import Mesh
from planner.sharding.rule import Dims, FactorKind, Rule, Strategy, pieces_of
from planner.sharding.rules import rule_of
from planner.sharding.stored import StoredParameter

Sequences = Mapping[str, frozenset[int]]
"""The dims of each value that are sequences; values without any are left out."""


class _Mark(NamedTuple):
    """The part of a dim that is a sequence: `extent` elements that lie `inner` apart."""

    name: str
    dim: int
    inner: int
    extent: int


def zigzag_runs(extent: int, size: int, place: int, where: str = "a sequence") -> tuple[tuple[int, int], ...]:
    """(start, length) of the two chunks of an extent that device number `place` of `size` has.

    Raises LayoutError, with the nearest extents that can be cut so.
    """
    chunk, rest = divmod(extent, 2 * size)
    if rest:
        raise LayoutError(
            f"{where}: zigzag order over {size} devices cuts into {2 * size} chunks, which do not divide {extent};"
            f" {nearest_words(extent, multiples(extent, 2 * size))}; or cut in contiguous order"
        )
    return (place * chunk, chunk), ((2 * size - 1 - place) * chunk, chunk)


def pieces_of_ring(extent: int, size: int, place: int, zigzag: bool) -> tuple[tuple[int, int], ...]:
    """(start, length) of the pieces that device number `place` has of an extent that a ring of `size` cuts."""
    piece = extent // size
    return zigzag_runs(extent, size, place) if zigzag else ((place * piece, piece),)


def sequences_of(graph: OperatorGraph) -> Sequences:
    """Dims of all values and parameters of a graph that are sequences which some ring splits."""
    rules = [rule_of(graph, op) for op in graph.operators]
    waiting = [mark for at, rule in enumerate(rules) for mark in _seeds(graph, at, rule)]
    users: dict[str, list[int]] = {}
    for at, op in enumerate(graph.operators) if waiting else ():
        for name in dict.fromkeys((*op.operands, *(r for r in op.results if r is not None))):
            users.setdefault(name, []).append(at)
    found = set(waiting)
    while waiting:
        mark = waiting.pop()
        for at in users.get(mark.name, ()):
            new = {*_through(graph, at, rules[at], mark)} - found
            found |= new
            waiting += new
    sequences: dict[str, frozenset[int]] = {}
    for mark in found:
        sequences[mark.name] = sequences.get(mark.name, frozenset()) | {mark.dim}
    return sequences


def _tensors(graph: OperatorGraph, at: int, rule: Rule) -> Iterator[tuple[str, Dims]]:
    op = graph.operators[at]
    yield from zip(op.operands, rule.operands, strict=True)
    yield from zip((name for name in op.results if name is not None), rule.results, strict=True)


def _seeds(graph: OperatorGraph, at: int, rule: Rule) -> Iterator[_Mark]:
    parts = {part for factor in rule.factors if factor.kind is FactorKind.RING for part in factor.parts}
    for name, dims in _tensors(graph, at, rule):
        for dim, factors in enumerate(dims):
            if factors and factors[0] in parts:
                yield _Mark(name, dim, 1, rule.factors[factors[0]].extent)


def _through(graph: OperatorGraph, at: int, rule: Rule, mark: _Mark) -> Iterator[_Mark]:
    """The marks in all dims that an operator loops over together with the dim of a mark."""
    for name, dims in _tensors(graph, at, rule):
        if name != mark.name:
            continue
        for factor, inner in _with_steps(rule, dims[mark.dim]):
            extent = rule.factors[factor].extent
            top = mark.inner * mark.extent
            if inner <= mark.inner and top <= inner * extent:  # the sequence is the loop, or inside of it
                yield from _in_loop(graph, at, rule, factor, mark.inner // inner, mark.extent)
            elif inner >= mark.inner and inner * extent == top:  # the loop is the outer part of the sequence
                yield from _in_loop(graph, at, rule, factor, 1, extent)


def _in_loop(graph: OperatorGraph, at: int, rule: Rule, factor: int, inner: int, extent: int) -> Iterator[_Mark]:
    for name, dims in _tensors(graph, at, rule):
        for dim, factors in enumerate(dims):
            for other, steps in _with_steps(rule, factors):
                if other == factor:
                    yield _Mark(name, dim, steps * inner, extent)


def _with_steps(rule: Rule, factors: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The loops of a dim and how many elements apart their steps are."""
    for place, factor in enumerate(factors):
        yield factor, math.prod(rule.factors[f].extent for f in factors[place + 1 :])


Tensors = Sequence[tuple[Dims, Collection[int]]]
"""Dims of the tensors of a call, and which of them are sequences."""


def tensors_of(rule: Rule, operands: Sequence[str], results: Sequence[str | None], sequences: Sequences) -> Tensors:
    """The tensors of a call with these names."""
    names = (*operands, *(name for name in results if name is not None))
    return [
        (dims, sequences.get(name, frozenset()))
        for name, dims in zip(names, (*rule.operands, *rule.results), strict=True)
    ]


def order_fault(rule: Rule, strategy: Strategy, mesh: Mesh, tensors: Tensors) -> Fault | None:
    """Why a legal strategy is impossible on axes that cut sequences in zigzag order; None where it is possible."""
    for axis in sorted(mesh.zigzag):
        choice, outer = strategy[axis], (*strategy[: axis + 1], *(None for _ in strategy[axis + 1 :]))
        pieces = pieces_of(rule, outer, mesh.sizes)  # that this axis and those before it cut
        for factor in rule.splits[choice] if choice is not None else ():
            split, name = rule.factors[factor], mesh.axes[axis].name
            kinds = {dim in marked for dims, marked in tensors for dim, factors in enumerate(dims) if factor in factors}
            if len(kinds) > 1:
                return Fault(
                    reason=f"{name} cuts sequences in zigzag order, and factor '{split.name}' indexes a sequence in one"
                    " tensor and something else in another",
                    hint="split another factor, or cut in contiguous order",
                )
            if True in kinds and rule.factors[choice or 0].kind is FactorKind.HALO:
                return Fault(
                    reason=f"{name} cuts sequences in zigzag order, in which neighbours do not have what comes"
                    f" before and behind a piece of factor '{split.name}'",
                    hint="split another factor, or cut in contiguous order",
                )
            if True in kinds and split.extent % (2 * pieces[factor]):
                chunks = 2 * pieces[factor]
                return Fault(
                    reason=f"{name} cuts factor '{split.name}' of extent {split.extent} in zigzag order into {chunks}"
                    " chunks, which do not divide it",
                    hint=nearest_words(split.extent, multiples(split.extent, chunks)),
                )
    return None


def check_parameter(name: str, stored: StoredParameter, mesh: Mesh, sequences: Sequences) -> None:
    """Raise StrategyError where a parameter is cut along a sequence on an axis with an order of its own."""
    for axis in sorted(mesh.zigzag):
        for layout in (stored.weight, stored.gradient):
            if layout[axis].is_shard and layout[axis].dim in sequences.get(name, ()):
                raise StrategyError(
                    f"parameter '{name}' is stored cut along dim {layout[axis].dim} on {mesh.axes[axis].name}, which"
                    " cuts that sequence in zigzag order; store it whole on that axis, or cut in contiguous order"
                )


def sequences_on(mesh: Mesh, graph: OperatorGraph) -> Sequences:
    """The sequences of a graph, where an axis cuts them in an order of its own; else none."""
    return sequences_of(graph) if mesh.zigzag else {}
