"""Weights that Muon updates together: each device that has pieces of them makes one of them orthogonal.

    weights of a rank   q0 q1 q2 q3 q4     same shape, dtype, layout of the state, and owner; each in pieces on N = 4
    groups              q0 q1 q2 q3 | q4   in the last group three devices have nothing to do

All devices of a pipeline rank have the same groups in the same order.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.parameter_owners import Owner, owners_of
from planner.pricing.matrix_update import Stack, stack_of
from planner.sharding.buckets import arrival_order
from planner.sharding.matrices import MUON, matrices_of
from planner.sharding.stored import StoredParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixGroup:
    """Weights that are updated together, at most as many as their stack has places, and the owner of their states, if
    any."""

    names: tuple[str, ...]
    stack: Stack
    stored: StoredParameter
    owner: Owner | None

    @property
    def spare(self) -> float:
        """Empty places of the stack."""
        return self.stack.size - len(self.names)


def matrix_groups(bound: BoundPlan, held: Collection[str], coordinate: Sequence[int]) -> tuple[MatrixGroup, ...]:
    """The groups of a pipeline rank that holds these parameters, for the device at this coordinate of the mesh; none
    without Muon."""
    training = bound.plan.training
    if training.optimizer != MUON:
        return ()
    key = ("matrices", training.update, bound.plan.stages, frozenset(held))
    every = bound.once(key, lambda: _groups(bound, held))
    return tuple(group for group in every if group.owner is None or group.owner.at(coordinate))


def _groups(bound: BoundPlan, held: Collection[str]) -> tuple[MatrixGroup, ...]:
    matrices, owners, sizes = matrices_of(bound.graph), owners_of(bound, held), bound.plan.mesh.sizes
    alike: dict[object, list[str]] = {}
    for name in arrival_order(bound.graph):
        if name in held and name in matrices:
            tensor, stored = bound.graph.types[name], bound.parameters[name]
            alike.setdefault((tensor.shape, tensor.dtype, stored.state, owners.get(name)), []).append(name)
    found = []
    for names in alike.values():
        stored = bound.parameters[names[0]]
        stack = stack_of(bound.graph.types[names[0]], stored.state, sizes)
        for start in range(0, len(names), stack.size):
            together = tuple(names[start : start + stack.size])
            found.append(MatrixGroup(names=together, stack=stack, stored=stored, owner=owners.get(names[0])))
    return tuple(found)
