"""Candidates: the legal strategies of an operator and the layouts that follow, for a mesh.

Equal lists are made once, for all meshes: legality and layouts depend on the form of a rule and on which sets of axes
divide its factors, not on the extents themselves, so another batch size or another block finds its candidates ready.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.sharding.layout import Layout
from planner.sharding.mesh import Mesh
from planner.sharding.redistribute import cut_limits
from planner.sharding.rule import Rule, Strategy, derive_layouts, legal_strategies

Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutColumn:
    """The layouts of one tensor under K candidates: the distinct ones, and for each candidate which."""

    distinct: tuple[Layout, ...]
    index: Indices

    @staticmethod
    def of(layouts: Sequence[Layout]) -> "LayoutColumn":
        order: dict[Layout, int] = {}
        index = np.array([order.setdefault(layout, len(order)) for layout in layouts], dtype=np.intp)
        return LayoutColumn(distinct=tuple(order), index=index)

    def of_candidate(self, place: int) -> Layout:
        """That of one candidate."""
        return self.distinct[self.index[place]]

    def at(self, places: Indices) -> "LayoutColumn":
        """Those of candidates at some places."""
        return LayoutColumn(distinct=self.distinct, index=self.index[places])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DuplexColumn:
    """Forward and gradient layouts of one tensor under K candidates."""

    forward: LayoutColumn
    gradient: LayoutColumn

    def at(self, places: Indices) -> "DuplexColumn":
        """Those of candidates at some places."""
        return DuplexColumn(forward=self.forward.at(places), gradient=self.gradient.at(places))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """Legal strategies of an operator and the layouts of its operands and results under each. Of a linear layer that
    may be in fp8 or not the first `narrow` are in fp8 and all others are not, so that a strategy may be there twice;
    None of what has one way to compute."""

    strategies: tuple[Strategy, ...]
    operands: tuple[DuplexColumn, ...]
    results: tuple[DuplexColumn, ...]
    narrow: int | None = None

    @property
    def ways(self) -> tuple[tuple[Strategy, bool], ...]:
        """Strategies, with whether they are among the `narrow`."""
        count = len(self.strategies) if self.narrow is None else self.narrow
        return tuple((strategy, at < count) for at, strategy in enumerate(self.strategies))

    def either(self, narrow: Indices, wide: Indices) -> "Candidates":
        """These, at some places in fp8, and at some without it."""
        places = np.concatenate([narrow, wide])
        return Candidates(
            strategies=tuple(self.strategies[at] for at in places.tolist()),
            operands=tuple(column.at(places) for column in self.operands),
            results=tuple(column.at(places) for column in self.results),
            narrow=len(narrow),
        )


@dataclass(kw_only=True)
class CandidateLists:
    """Finds candidate lists for one shape of mesh."""

    mesh: Mesh
    _known: dict[tuple[object, ...], Candidates] = field(default_factory=dict)
    _of_rule: dict[int, tuple[Rule, Candidates]] = field(default_factory=dict)

    def of(self, rule: Rule) -> Candidates:
        """All candidates of a rule."""
        if id(rule) not in self._of_rule:
            self._of_rule[id(rule)] = (rule, self._of_form(rule))
        return self._of_rule[id(rule)][1]

    def among(self, rule: Rule, strategies: tuple[Strategy, ...]) -> Candidates:
        """The given strategies of a rule, which must be legal, as its candidates."""
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
    """All of a rule that layouts depend on (`_layouts_of`), and a rule that has this form."""

    content: tuple[object, ...]
    rule: Rule = field(compare=False)


@lru_cache(maxsize=512)
def _made(form: _Form, strategies: tuple[Strategy, ...]) -> Candidates:
    """Strategies of rules of a form as candidates: those of all meshes with as many axes."""
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
    """All of a rule that the layouts under a strategy depend on."""
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
