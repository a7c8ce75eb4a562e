"""What the linear layers of a template take: whole, and cut into chunks along their rows, beside which a collective may
run (`under_products`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hardware_profiles import Cluster
from planner.graph.blocks import IDENTITY
from planner.graph.fp8 import without_fp8
from planner.graph.operator_graph import Operator
from planner.plan.layout.overlapped_products import is_product
from planner.pricing import OperatorPrices, price_operator
from planner.sharding.mesh import Mesh
from planner.sharding.rule import Rule, Strategy, pieces_of
from planner.sharding.rules import rule_of
from planner.strategy_search.request.template import Template, ValueEdge
from planner.strategy_search.tables.candidates import Candidates

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

Key: TypeAlias = tuple[int, tuple[bool, ...], int]
"""A key for the price of a product: the identities of its rule and of its candidates, and which operands have
gradients."""

CHUNKS = (1, 2, 4, 8)
"""The numbers of chunks that are tried."""

WHOLE = 5
"""The number of rows of `Products` that describe whole products."""


@dataclass(frozen=True, slots=True, eq=False)
class Products:
    """The prices of some products under N candidates, in rows (`WHOLE` + 2 chunks, N): seconds forward, backward, and
    of the weight gradients; bytes read and bytes made; then for each of `CHUNKS` the seconds of a chunk forward; then
    those of a chunk of the gradient of the rows."""

    rows: Array

    @classmethod
    def of(cls, prices: OperatorPrices, weights: Array, pieces: Sequence[Array], gradients: Sequence[Array]) -> Self:
        """Products from their prices: whole ones, those of the gradients of `weights`, and those of chunks."""
        whole = (prices.forward, prices.backward, weights, prices.operands[0], prices.results[0])
        return cls(np.stack([*whole, *pieces, *gradients]))

    def taken(self, at: Indices, *, or_none: bool = False) -> "Products":
        """A subset of the candidates; with `or_none` followed by a candidate without a product."""
        found = np.zeros((len(self.rows), len(at) + or_none))
        found[:, : len(at)] = self.rows[:, at]
        return Products(found)

    @classmethod
    def joined(cls, several: "Sequence[Products]") -> "Products":
        """The candidates of several, one after the other."""
        return cls(np.concatenate([one.rows for one in several], axis=1))

    def beside(self, other: "Products") -> "Products":
        """These products followed by others: every pair of candidates."""
        return Products((self.rows[:, :, None] + other.rows[:, None, :]).reshape(len(self.rows), -1))


@dataclass(kw_only=True)
class ProductPrices:
    """The prices of linear layers on a mesh, computed once for equal layers with equal candidates."""

    mesh: Mesh
    cluster: Cluster
    _known: dict[Key, tuple[Rule, Candidates, Products]] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget all prices."""
        self._known.clear()

    def key(self, template: Template, at: int, candidates: Candidates) -> Key:
        """The key of a linear layer's price."""
        graph = template.graph
        op = graph.operators[at]
        return id(rule_of(graph, op)), graph.graded(op), id(candidates)

    def of(self, template: Template, at: int, candidates: Candidates) -> Products:
        """The prices of a linear layer under its candidates."""
        graph = template.graph
        op = graph.operators[at]
        rule = rule_of(graph, op)
        key = self.key(template, at, candidates)
        if key not in self._known:
            some, strategies = candidates.narrow, candidates.strategies
            if some is None:
                products = self._products(template, op, rule, strategies)
            else:  # products in fp8 run without overlap
                products = self._products(template, op, rule_of(graph, without_fp8(op)), strategies[some:])
                products = Products.joined([Products(np.zeros((len(products.rows), some))), products])
            self._known[key] = (rule, candidates, products)
        return self._known[key][2]

    def _products(self, template: Template, op: Operator, rule: Rule, strategies: Sequence[Strategy]) -> Products:
        """The prices of a linear layer under some strategies of a rule."""
        graph = template.graph
        graded = graph.graded(op)
        types = ([graph.types[name] for name in op.operands], [graph.types[n] for n in op.results if n is not None])
        rows, weights = (graded[0], *(False for _ in graded[1:])), (False, *graded[1:])

        def priced(rule: Rule, strategies: Sequence[Strategy], graded: tuple[bool, ...]) -> OperatorPrices:
            return price_operator(rule, strategies, *types, graded, self.mesh, self.cluster)

        whole = priced(rule, strategies, graded)
        alone = priced(rule, strategies, rows)
        longest = _longest_rows(rule)
        held = np.array([pieces_of(rule, one, self.mesh.sizes)[longest or 0] for one in strategies])
        pieces, gradients = [whole.forward], [alone.backward]
        for chunks in CHUNKS[1:]:
            pieces.append(whole.forward / chunks)  # a chunk takes at least its share
            gradients.append(alone.backward / chunks)
            extent = 0 if longest is None else rule.factors[longest].extent // chunks
            fitting = np.flatnonzero(held <= extent)
            if longest is not None and fitting.size:
                some = [strategies[at] for at in fitting.tolist()]
                part = priced(_with_extent(rule, longest, extent), some, rows)
                pieces[-1][fitting], gradients[-1][fitting] = part.forward, part.backward
        return Products.of(whole, priced(rule, strategies, weights).backward, pieces, gradients)


def _longest_rows(rule: Rule) -> int | None:
    """The longest factor of the rows of a linear layer, along which chunks are cut; None if there is a single row."""
    outer = [factors[0] for factors in rule.operands[0][:-1] if factors]
    return max(outer, key=lambda at: rule.factors[at].extent, default=None)


def _with_extent(rule: Rule, factor: int, extent: int) -> Rule:
    factors = (replace(one, extent=extent) if at == factor else one for at, one in enumerate(rule.factors))
    return replace(rule, factors=tuple(factors))


def _is_product(template: Template, at: int) -> bool:
    op, graph = template.graph.operators[at], template.graph
    op = without_fp8(op) if at in template.either else op
    return is_product(graph, op) and len(graph.types[op.operands[0]].shape) > 1


def takes_result(template: Template, edge: ValueEdge) -> bool:
    """Whether an edge takes the result of a product to its only reader."""
    alone = len(template.leaving[edge.producer]) == 1
    return alone and edge.kind in ("inside", "outside") and _is_product(template, edge.producer)


def products_of(template: Template, edge: ValueEdge) -> tuple[int, ...]:
    """The products that read the value of an edge: its consumer, or the readers of the identity that shares it, those
    with large weights first."""
    if edge.operand == 0 and _is_product(template, edge.consumer):
        return (edge.consumer,)
    if template.graph.operators[edge.consumer].op != IDENTITY:
        return ()
    readers = (one.consumer for one in template.leaving.get(edge.consumer, ()) if one.operand == 0)
    found, graph = [at for at in dict.fromkeys(readers) if _is_product(template, at)], template.graph
    return tuple(sorted(found, key=lambda at: -graph.types[graph.operators[at].operands[1]].nbytes))


def place_of(template: Template, edge: ValueEdge) -> int:
    """Which of the named results of its producer an edge carries."""
    results = template.graph.operators[edge.producer].results
    return [name for name in results if name is not None].index(edge.name)
