"""What the local form of an operator knows about its piece."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from planner.graph.per_replica import replicas_in, shape_of_one, unwrapped
from planner.plan.binding.bind import BoundOperator
from planner.sharding.rule import FactorKind, derive_layouts, ring_axis
from planner.sharding.rules.einsum import FEW
from runtime.comm.device_mesh import RankMesh
from runtime.ops.fp8.fp8_scales import Known
from runtime.ops.randomness import Region

_ALL = slice(None)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What a local form may know: the operator under its strategy, this rank, the local shapes of the results, and the
    region of the first result; `scales` are fp8 scales that are known before the layer runs. What attention needs in
    every call is cached."""

    bound: BoundOperator
    place: RankMesh
    shapes: tuple[tuple[int, ...], ...]
    region: Region
    scales: Known | None = None

    def axes(self, factor: str) -> tuple[int, ...]:
        """Axes of size 2 or more that split a factor, outer cut first."""
        if factor not in self.bound.rule.index:
            return ()
        index, sizes = self.bound.rule.index[factor], self.place.mesh.sizes
        return tuple(a for a, choice in enumerate(self.bound.strategy) if choice == index and sizes[a] > 1)

    def cutting(self, factor: str) -> tuple[int, ...]:
        """Axes of size 2 or more that cut a factor, alone or in an exchange, outer cut first."""
        if factor not in self.bound.rule.index:
            return ()
        rule, sizes = self.bound.rule, self.place.mesh.sizes
        cut = {index for index, parts in enumerate(rule.splits) if rule.index[factor] in parts}
        return tuple(a for a, choice in enumerate(self.bound.strategy) if choice in cut and sizes[a] > 1)

    def exchanges(self, axis: int) -> bool:
        """Whether rows are exchanged (all-to-all) on an axis."""
        choice = self.bound.strategy[axis]
        return choice is not None and self.bound.rule.factors[choice].kind is FactorKind.EXCHANGE

    @cached_property
    def ring(self) -> int | None:
        """The ring axis, of size 2 or more; None where there is none."""
        return ring_axis(self.bound.rule, self.bound.strategy, self.place.mesh.sizes)

    @cached_property
    def heads(self) -> slice:
        """The local key heads that the local query heads share: all of them, unless an axis splits only the heads of
        queries."""
        if not self.axes("r") or FEW not in self.bound.rule.index:
            return _ALL
        group = self.extent("r") // self.extent(FEW)
        first = self._first("r") // group - self._first(FEW)
        return slice(first, first + 1)

    def shared(self, key_BGKD: torch.Tensor) -> torch.Tensor:
        """Keys, or values, of the heads that the local query heads share."""
        return key_BGKD if self.heads == _ALL else key_BGKD[:, self.heads]

    @cached_property
    def replicas(self) -> int:
        """The number of replicas on this rank, for a per-replica operator."""
        replica, count = self.bound.rule.replica, replicas_in(self.bound.operator.keywords).count
        for choice, size in zip(self.bound.strategy, self.place.mesh.sizes, strict=True):
            count //= size if choice == replica else 1
        return count

    @cached_property
    def one(self) -> "Shard":
        """The piece of one of these replicas."""
        rule, results = self.bound.rule, replicas_in(self.bound.operator.keywords).results
        assert rule.one is not None, "an operator of every replica"
        strategy = tuple(None if choice == rule.replica else choice for choice in self.bound.strategy)
        layouts = derive_layouts(rule.one, strategy)
        shapes = [shape_of_one(shape, at, self.replicas) for shape, at in zip(self.shapes, results, strict=True)]
        operator = unwrapped(self.bound.operator)
        bound = BoundOperator(operator=operator, rule=rule.one, strategy=strategy, layouts=layouts)
        return replace(self, bound=bound, shapes=tuple(shapes))

    def _first(self, factor: str) -> int:
        """First index of a factor on this rank, over all axes that split it."""
        rule, start, extent = self.bound.rule, 0, self.extent(factor)
        for axis, choice in enumerate(self.bound.strategy):
            if choice is not None and rule.index[factor] in rule.splits[choice]:
                extent //= self.place.mesh.sizes[axis]
                start += self.place.coordinate[axis] * extent
        return start

    def extent(self, factor: str) -> int:
        """Extent of a factor over all ranks."""
        return self.bound.rule.factors[self.bound.rule.index[factor]].extent

    def offset(self, factor: str) -> int:
        """First index of a factor on this rank."""
        axes = self.axes(factor)
        if not axes:
            return 0
        start, extent = 0, self.extent(factor)
        for axis in axes:
            extent //= self.place.mesh.sizes[axis]
            start += self.place.coordinate[axis] * extent
        return start


Form = Callable[..., Any]
"""A local form: called with a `Shard` and the operator's own arguments; with dropout, the 64-bit key of its random
numbers comes between the two."""
