"""Seconds of every redistribution between any two layouts of a tensor, as a table.

All paths are followed at once: from each layout one step towards each other layout, adding the price of that step,
until all have arrived. Equal steps (same collective, axis and share of the tensor) are priced once.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from costmodels import operator_time
from hardware_profiles import Cluster
from planner.graph.operator_graph import TensorType
from planner.pricing.message import Message, message_seconds
from planner.sharding.layout import Layout
from planner.sharding.mesh import Mesh
from planner.sharding.redistribute import COLLECTIVES, Routes, Step, cut_limits, redistribution, routes

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
_Kind = tuple[str, int, float]  # collective or local step, axis, share of the tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class RedistributionTable:
    """Seconds from layout i to layout j of one tensor, (n, n), and whether anything is sent, so that the result has
    memory of its own; `position` says which row and column a layout has."""

    position: dict[Layout, int]
    seconds: Array
    sends: NDArray[np.bool_]

    def at(self, source: Layout, target: Layout) -> float:
        return float(self.seconds[self.position[source], self.position[target]])


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRoute:
    """One redistribution: its seconds and its messages in order."""

    seconds: float
    messages: tuple[Message, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Kinds:
    """The routes of one kind of tensor with their steps grouped: `of_arc[i, k]` is the kind of the step from i to k."""

    routes: Routes
    kinds: tuple[_Kind, ...]
    of_arc: Indices
    position: dict[Layout, int]


@dataclass(kw_only=True, eq=False)
class RedistributionPricer:
    """Prices redistributions on one mesh of one cluster. Keeps what it has priced."""

    mesh: Mesh
    cluster: Cluster
    _kinds: dict[tuple[int, ...], _Kinds] = field(default_factory=dict)
    _tables: dict[tuple[tuple[int, ...], int], RedistributionTable] = field(default_factory=dict)
    _routes: dict[tuple[tuple[int, ...], int, Layout, Layout], PricedRoute] = field(default_factory=dict)

    def table(self, tensor: TensorType) -> RedistributionTable:
        """Seconds between all layouts of a tensor."""
        limits = cut_limits(tensor.shape, self.mesh.sizes)
        key = (limits, tensor.nbytes)
        if key not in self._tables:
            self._tables[key] = self._make(limits, float(tensor.nbytes))
        return self._tables[key]

    def seconds(self, tensor: TensorType, source: Layout, target: Layout) -> float:
        """Seconds of one redistribution."""
        return 0.0 if source == target else self.table(tensor).at(source, target)

    def sends(self, tensor: TensorType, source: Layout, target: Layout) -> bool:
        """Whether a redistribution sends anything; if not, what comes out shares the memory of what went in."""
        table = self.table(tensor)
        return bool(table.sends[table.position[source], table.position[target]])

    def route(self, tensor: TensorType, source: Layout, target: Layout) -> PricedRoute:
        """One redistribution step by step: the same seconds, and the messages they stand for."""
        key = (cut_limits(tensor.shape, self.mesh.sizes), tensor.nbytes, source, target)
        if key not in self._routes:
            steps = [
                step
                for step in redistribution(tensor.shape, self.mesh, source, target)
                if self.mesh.sizes[step.axis] > 1
            ]
            self._routes[key] = PricedRoute(
                seconds=math.fsum(self._price(s.kind, s.axis, s.fraction, tensor.nbytes) for s in steps),
                messages=tuple(
                    Message(kind=step.kind, axis=step.axis, nbytes=step.fraction * tensor.nbytes)
                    for step in steps
                    if step.kind in COLLECTIVES
                ),
            )
        return self._routes[key]

    def _make(self, limits: tuple[int, ...], nbytes: float) -> RedistributionTable:
        if limits not in self._kinds:
            self._kinds[limits] = _grouped(routes(self.mesh, limits))
        known = self._kinds[limits]
        price = np.array([*(self._price(*kind, nbytes) for kind in known.kinds), 0.0])
        of_arc, onward = price[known.of_arc], known.routes.onward
        sending = np.array(
            [*(kind in COLLECTIVES and self.mesh.sizes[axis] > 1 for kind, axis, _ in known.kinds), False]
        )
        count = len(onward)
        goal = np.arange(count)[None, :]
        here = np.repeat(np.arange(count)[:, None], count, axis=1)
        seconds, sends = np.zeros((count, count)), np.zeros((count, count), dtype=np.bool_)
        while not np.array_equal(here, np.broadcast_to(goal, here.shape)):
            after = onward[here, goal]
            seconds += of_arc[here, after]
            sends |= sending[known.of_arc[here, after]]
            here = after
        return RedistributionTable(position=known.position, seconds=seconds, sends=sends)

    def _price(self, kind: str, axis: int, fraction: float, nbytes: float) -> float:
        message = fraction * nbytes
        if kind in COLLECTIVES:
            return message_seconds(Message(kind=kind, axis=axis, nbytes=message), self.mesh, self.cluster)
        if kind == "slice" or self.mesh.sizes[axis] == 1:
            return 0.0  # a view
        # zero and pad write a tensor of the size held before
        return operator_time(
            op_class="copy", flops=0.0, bytes_moved=2 * message, dtype="fp32", device=self.cluster.device
        )


def _grouped(found: Routes) -> _Kinds:
    kinds: dict[_Kind, int] = {}

    def number(step: Step) -> int:
        return kinds.setdefault((step.kind, step.axis, step.fraction), len(kinds))

    numbers = np.array([*(number(step) for step in found.steps), 0], dtype=np.intp)
    stay = len(kinds)  # no step: priced 0
    of_arc = np.where(found.arc >= 0, numbers[found.arc], stay)
    position = {layout: i for i, layout in enumerate(found.layouts)}
    return _Kinds(routes=found, kinds=tuple(kinds), of_arc=of_arc, position=position)
