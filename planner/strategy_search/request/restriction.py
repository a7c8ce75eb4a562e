"""Restrictions: tables of some candidates instead of all, for meshes on which all are too many.

fixed          every operator and parameter has its one candidate
one axis free  ... but for one axis of the mesh, on which it takes whatever is legal beside the others
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from planner.graph.operator_graph import OperatorGraph, TensorType
from planner.sharding.mesh import Mesh
from planner.sharding.rule import FactorKind, Rule, Strategy, legal_strategies
from planner.sharding.rules import rule_of
from planner.sharding.stored import StoredParameter, legal_stored, stored_options
from planner.strategy_search.request.constraints import Decided


class Restriction(Protocol):
    """The candidates to look at: at least one, and none that is illegal, for each operator and parameter.

    It makes them itself, as the list of all that are legal may be too long to be made. Operators that compute the same
    in every step are not asked for: they split nothing.
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
    """Everything is as in `fixed` on all axes but one. What `fixed` says on that axis does not matter. `decided` has
    what the user wants on all axes."""

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
        """Whether everything has a candidate: what is fixed may not be legal on another mesh."""
        return all(
            self.strategies(index, rule_of(graph, op), mesh) for index, op in enumerate(graph.operators)
        ) and all(
            self.stored(p.name, graph.types[p.name], p.name in graph.differentiable, mesh) for p in graph.parameters
        )
