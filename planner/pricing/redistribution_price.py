"""Seconds of every redistribution between two lists of layouts of one tensor, as a table.

A path is a list of steps; equal steps (same collective, axis and share of the tensor) of different paths are priced once:

    table[source, target] = sum of counts[source, target, step] * seconds(step)

The counts depend only on which dims divide, so they are shared by all tensors of a kind; the seconds depend on the bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from costmodels import collective_time, operator_time
from hardware_profiles import Cluster
from planner.graph.operator_graph import TensorType
from planner.sharding.layout import Layout
from planner.sharding.mesh import Mesh
from planner.sharding.redistribute import COLLECTIVES, Step, cut_limits, paths_from

Array = NDArray[np.float64]
_Kind = tuple[str, int, float]  # collective or local step, axis, share of the tensor


@dataclass(kw_only=True, eq=False)
class RedistributionPricer:
    """Prices redistributions on one mesh of one cluster. Keeps what it has priced."""

    mesh: Mesh
    cluster: Cluster
    _kinds: dict[_Kind, int] = field(default_factory=dict)
    _rows: dict[tuple[tuple[int, ...], Layout], dict[Layout, tuple[int, ...]]] = field(default_factory=dict)
    _seconds: dict[float, list[float]] = field(default_factory=dict)
    _tables: dict[tuple[object, ...], Array] = field(default_factory=dict)

    def table(self, tensor: TensorType, sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> Array:
        """Seconds from each source layout to each target layout of a tensor, (sources, targets)."""
        key = (tensor.shape, tensor.element_bytes, sources, targets)
        if key not in self._tables:
            limits = cut_limits(tensor.shape, self.mesh.sizes)
            rows = [self._paths(limits, source) for source in sources]
            seconds = self._step_seconds(float(tensor.nbytes))
            self._tables[key] = np.array([[sum(seconds[s] for s in row[target]) for target in targets] for row in rows])
        return self._tables[key]

    def seconds(self, tensor: TensorType, source: Layout, target: Layout) -> float:
        """Seconds of one redistribution."""
        if source == target:
            return 0.0
        steps = self._paths(cut_limits(tensor.shape, self.mesh.sizes), source)[target]
        seconds = self._step_seconds(float(tensor.nbytes))
        return sum(seconds[step] for step in steps)

    def _paths(self, limits: tuple[int, ...], source: Layout) -> dict[Layout, tuple[int, ...]]:
        key = (limits, source)
        if key not in self._rows:
            self._rows[key] = {
                target: tuple(self._index(step) for step in steps)
                for target, steps in paths_from(self.mesh, limits, source).items()
            }
        return self._rows[key]

    def _index(self, step: Step) -> int:
        return self._kinds.setdefault((step.kind, step.axis, step.fraction), len(self._kinds))

    def _step_seconds(self, nbytes: float) -> list[float]:
        """Seconds of every kind of step met so far, for a tensor of that many bytes."""
        known = self._seconds.setdefault(nbytes, [])
        for kind, axis, fraction in list(self._kinds)[len(known) :]:
            known.append(self._price(kind, axis, fraction * nbytes))
        return known

    def _price(self, kind: str, axis: int, message: float) -> float:
        if kind in COLLECTIVES:
            line = self.mesh.axes[axis]
            return float(collective_time(kind, message, self.cluster.group(line.size, line.stride)))
        if kind == "slice":
            return 0.0  # a view
        # zero and pad write a tensor of the local size
        return float(
            operator_time(op_class="copy", flops=0.0, bytes_moved=2 * message, dtype="fp32", device=self.cluster.device)
        )
