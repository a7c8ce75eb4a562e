"""Restrictions: tables of some candidates instead of all, for meshes on which there are too many.

fixed           every operator and parameter has one candidate
one axis free   the same, but on one axis of the mesh everything legal is allowed
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from planner.graph.operator_graph import OperatorGraph, TensorType
from planner.sharding.legality import legal_strategies
from planner.sharding.mesh import Mesh
from planner.sharding.rule import FactorKind, Rule, Strategy
from planner.sharding.rules import rule_of
from planner.sharding.stored import StoredParameter, legal_stored, stored_options
from planner.strategy_search.request.constraints import Decided


class Restriction(Protocol):
    """The candidates to examine: at least one legal candidate for each operator and parameter.

    A restriction generates them itself, since the list of all legal ones may be too long. It is not asked about
    operators that compute the same in every step: they split nothing.
    """

    def strategies(self, index: int, rule: Rule, mesh: Mesh) -> tuple[Strategy, ...]:
        """Strategies of the operator at a position of the template."""

    def stored(self, name: str, tensor: TensorType, trainable: bool, mesh: Mesh) -> tuple[StoredParameter, ...]:
        """Stored layouts of a parameter."""


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """One candidate each: strategies by position in the template, stored layouts by name."""

    operators: tuple[Strategy, ...]
    parameters: Mapping[str, StoredParameter]

    def strategies(self, index: int, rule: Rule, mesh: Mesh) -> tuple[Strategy, ...]:
        return (self.operators[index],)

    def stored(self, name: str, tensor: TensorType, trainable: bool, mesh: Mesh) -> tuple[StoredParameter, ...]:
        return (self.parameters[name],)


@dataclass(frozen=True, kw_only=True)
class OneAxisFree:
    """As in `fixed` on all axes but one; the entries of `fixed` for that axis are ignored. `decided` has the user's
    decisions for all axes."""

    fixed: Fixed
    axis: int
    decided: Decided | None = None

    def strategies(self, index: int, rule: Rule, mesh: Mesh) -> tuple[Strategy, ...]:
        rings = self.decided is not None and "ring" in self.decided.roles
        unused = (FactorKind.BLOCKED,) if rings else (FactorKind.BLOCKED, FactorKind.RING)
        every = (None, *(i for i, factor in enumerate(rule.factors) if factor.kind not in unused))
        chosen = self.fixed.operators[index]
        among = [every if axis == self.axis else (c,) for axis, c in enumerate(chosen)]
        legal = legal_strategies(rule, mesh, among)
        return legal if self.decided is None else self.decided.agreeing(index, rule, legal, mesh)

    def stored(self, name: str, tensor: TensorType, trainable: bool, mesh: Mesh) -> tuple[StoredParameter, ...]:
        every, chosen = stored_options(len(tensor.shape), trainable), self.fixed.parameters[name]
        options = list(zip(chosen.weight, chosen.gradient, chosen.state, strict=True))
        allowed = [every if axis == self.axis else (option,) for axis, option in enumerate(options)]
        legal = legal_stored(tensor.shape, mesh.sizes, trainable, allowed)
        return legal if self.decided is None else self.decided.agreeing_stored(name, legal, len(mesh.axes))

    def possible(self, graph: OperatorGraph, mesh: Mesh) -> bool:
        """Whether everything has a candidate: the fixed choices may be illegal on another mesh."""
        return all(
            self.strategies(index, rule_of(graph, op), mesh) for index, op in enumerate(graph.operators)
        ) and all(
            self.stored(p.name, graph.types[p.name], p.name in graph.differentiable, mesh) for p in graph.parameters
        )
