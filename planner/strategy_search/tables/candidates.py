"""Candidates: the legal strategies of an operator on a mesh, and the layouts that follow from them.

Equal lists are made once for all meshes. Legality and layouts depend on the form of a rule and on which sets of axes
divide its factors, but not on the extents. So a graph with another batch size, or another block, reuses the lists.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.sharding.layout import Layout
from planner.sharding.legality import legal_strategies
from planner.sharding.mesh import Mesh
from planner.sharding.redistribute import cut_limits
from planner.sharding.rule import Rule, Strategy, derive_layouts

Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutColumn:
    """The layouts of one tensor under K candidates: the distinct layouts, and which of them each candidate has."""

    distinct: tuple[Layout, ...]
    index: Indices

    @staticmethod
    def of(layouts: Sequence[Layout]) -> "LayoutColumn":
        order: dict[Layout, int] = {}
        index = np.array([order.setdefault(layout, len(order)) for layout in layouts], dtype=np.intp)
        return LayoutColumn(distinct=tuple(order), index=index)

    def at(self, places: Indices) -> "LayoutColumn":
        """The column for a subset of the candidates."""
        return LayoutColumn(distinct=self.distinct, index=self.index[places])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DuplexColumn:
    """Forward and gradient layouts of one tensor under K candidates."""

    forward: LayoutColumn
    gradient: LayoutColumn

    def at(self, places: Indices) -> "DuplexColumn":
        """The columns for a subset of the candidates."""
        return DuplexColumn(forward=self.forward.at(places), gradient=self.gradient.at(places))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """The legal strategies of an operator, and the layouts of its operands and results under each.

    If the search may run a linear layer in fp8 or not, the first `narrow` candidates are in fp8 and the others are not,
    so a strategy may occur twice. `narrow` is None for operators with one way to compute.

    An identity that products and other operators read may have a strategy several times, too: `under` says under which
    of these products its value is gathered (`under_products`): the sum of 1, 2 and 4 for the three largest, or 8 for
    others alone, and 16 if something is sent backward only; 0 for none."""

    strategies: tuple[Strategy, ...]
    operands: tuple[DuplexColumn, ...]
    results: tuple[DuplexColumn, ...]
    narrow: int | None = None
    under: Indices | None = None

    @property
    def ways(self) -> tuple[tuple[Strategy, bool], ...]:
        """Each strategy, and whether it is one of the `narrow` ones."""
        count = len(self.strategies) if self.narrow is None else self.narrow
        return tuple((strategy, at < count) for at, strategy in enumerate(self.strategies))

    def only(self, place: int) -> "Candidates":
        """One of the candidates."""
        row = np.array([place])
        return Candidates(
            strategies=(self.strategies[place],),
            operands=tuple(column.at(row) for column in self.operands),
            results=tuple(column.at(row) for column in self.results),
            narrow=None if self.narrow is None else int(place < self.narrow),
            under=None if self.under is None else self.under[row],
        )

    def told_apart(self, places: Indices, under: Indices) -> "Candidates":
        """The candidates at some places, each gathered `under` some of the products that read its value."""
        return Candidates(
            strategies=tuple(self.strategies[at] for at in places.tolist()),
            operands=tuple(column.at(places) for column in self.operands),
            results=tuple(column.at(places) for column in self.results),
            under=under,
        )

    def either(self, narrow: Indices, wide: Indices) -> "Candidates":
        """Candidates at the places `narrow`, in fp8, followed by those at the places `wide`, without it."""
        places = np.concatenate([narrow, wide])
        return Candidates(
            strategies=tuple(self.strategies[at] for at in places.tolist()),
            operands=tuple(column.at(places) for column in self.operands),
            results=tuple(column.at(places) for column in self.results),
            narrow=len(narrow),
        )


@dataclass(kw_only=True)
class CandidateLists:
    """Makes the candidate lists for one shape of mesh."""

    mesh: Mesh
    _known: dict[tuple[object, ...], Candidates] = field(default_factory=dict)
    _of_rule: dict[int, tuple[Rule, Candidates]] = field(default_factory=dict)

    def of(self, rule: Rule) -> Candidates:
        """All candidates of a rule."""
        if id(rule) not in self._of_rule:
            self._of_rule[id(rule)] = (rule, self._of_form(rule))
        return self._of_rule[id(rule)][1]

    def among(self, rule: Rule, strategies: tuple[Strategy, ...]) -> Candidates:
        """The given strategies of a rule as candidates; they must be legal."""
        return _made(_Form(content=_layouts_of(rule), rule=rule), strategies)

    def _of_form(self, rule: Rule) -> Candidates:
        sizes = self.mesh.sizes
        extents = [factor.extent for factor in rule.factors]
        complete = tuple(_complete_sets(extent, sizes) for extent in extents)
        key = (*_layouts_of(rule), cut_limits(extents, sizes), complete)
        if key not in self._known:
            self._known[key] = self.among(rule, legal_strategies(rule, self.mesh))
        return self._known[key]


@dataclass(frozen=True, slots=True)
class _Form:
    """The part of a rule that layouts depend on (`_layouts_of`), and one rule of that form."""

    content: tuple[object, ...]
    rule: Rule = field(compare=False)


@lru_cache(maxsize=512)
def _made(form: _Form, strategies: tuple[Strategy, ...]) -> Candidates:
    """Strategies for rules of one form, as candidates. They are the same for all meshes with this number of axes."""
    layouts = [derive_layouts(form.rule, strategy) for strategy in strategies]

    def columns(side: str, count: int) -> tuple[DuplexColumn, ...]:
        tensors = [[getattr(row, side)[t] for row in layouts] for t in range(count)]
        return tuple(
            DuplexColumn(
                forward=LayoutColumn.of([duplex.forward for duplex in duplexes]),
                gradient=LayoutColumn.of([duplex.gradient for duplex in duplexes]),
            )
            for duplexes in tensors
        )

    return Candidates(
        strategies=strategies,
        operands=columns("operands", len(form.rule.operands)),
        results=columns("results", len(form.rule.results)),
    )


def _layouts_of(rule: Rule) -> tuple[object, ...]:
    """The part of a rule that the layouts under a strategy depend on."""
    aligned = tuple(rule.factors[f].extent for _, *parts in rule.aligned for f in parts)
    return (
        rule.operands,
        rule.results,
        tuple(factor.kind for factor in rule.factors),
        rule.splits,
        rule.addends,
        aligned,
    )


def _complete_sets(extent: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sets of axes (bit masks) whose product is exactly the extent: they split a factor completely."""
    found = []
    for subset in range(1 << len(sizes)):
        count = 1
        for axis, size in enumerate(sizes):
            if subset >> axis & 1:
                count *= size
        if count == extent:
            found.append(subset)
    return tuple(found)
