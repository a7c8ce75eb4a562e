"""The mesh: the devices of one pipeline stage as a grid with named axes, slowest links first.

Ranks inside a stage are numbered row by row: the last axis varies fastest, so its groups are neighbours and get the
fastest links. `bandwidth` of an axis is what a large all-gather reaches along it; it only weighs one route of a
redistribution against another, so that planner and runtime take the same route. Prices use the cluster itself.

An axis whose links or backend lack the all-to-all uses an all-gather and a slice of its result instead
(`planner.sharding.redistribute`). Experts exchange no rows on such an axis, though it may cut them.

An axis may cut sequences in *zigzag* order (`planner.sharding.zigzag`); everything else, and every sequence on other
axes, is cut into contiguous pieces.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from costmodels.collectives import collective_time
from hardware_profiles import Group, Machine, parts_of
from planner.errors import RequestError

_PROBE_BYTES = float(2**30)

Order = Literal["contiguous", "zigzag"]
ORDERS: tuple[Order, ...] = ("contiguous", "zigzag")
"""How an axis cuts a sequence."""

NODE: Literal["node"] = "node"
Alltoall = bool | Literal["node"]
"""Which axes have the all-to-all: every one, none, or those inside a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """`size` devices apart by `stride` ranks; `bandwidth` in bytes per second of a large all-gather along the axis;
    `order` in which it cuts sequences; `alltoall` says whether it has that collective."""

    name: str
    size: int
    stride: int
    bandwidth: float
    order: Order = "contiguous"
    alltoall: bool = True

    def line(self, rank: int) -> tuple[int, ...]:
        """The ranks that differ from this one on the axis only, itself among them, in ascending order; ranks may count
        through several meshes one after the other."""
        first = rank - rank // self.stride % self.size * self.stride
        return tuple(first + at * self.stride for at in range(self.size))


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Axes from the slowest links to the fastest. A mesh without axes is one device."""

    axes: tuple[MeshAxis, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @cached_property
    def zigzag(self) -> frozenset[int]:
        """Axes of two devices or more that cut sequences in zigzag order."""
        return frozenset(at for at, axis in enumerate(self.axes) if axis.order == "zigzag" and axis.size > 1)

    @cached_property
    def routing(self) -> tuple[tuple[int, float, bool], ...]:
        """All of its axes that paths between layouts depend on (`planner.sharding.redistribute.Routes`)."""
        return tuple((axis.size, axis.bandwidth, axis.alltoall) for axis in self.axes)

    @property
    def alltoall(self) -> bool:
        """Whether every axis has the all-to-all."""
        return all(axis.alltoall for axis in self.axes)

    @property
    def links_with_alltoall(self) -> Alltoall:
        """Which axes have the all-to-all, as `build_mesh` takes it: where some lack it, those inside a node have it."""
        has = [axis.alltoall for axis in self.axes if axis.size > 1]
        return all(has) or (NODE if any(has) else False)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Position of a rank (0 <= rank < size) on each axis."""
        return tuple(rank // axis.stride % axis.size for axis in self.axes)


def build_mesh(
    cluster: Machine,
    sizes: Sequence[int],
    innermost: int = 1,
    zigzag: Collection[int] = (),
    *,
    alltoall: Alltoall | Sequence[bool] = True,
) -> Mesh:
    """The mesh with axes of these sizes over the first prod(sizes) devices of a cluster, or over every `innermost`-th
    where each point of it stands for that many devices. Axes are named axis0, axis1, ...; those of `zigzag` cut
    sequences in that order. `alltoall` says which of them have that collective: each, none, those inside a node, or so
    for each axis. Of several kinds of devices each group has the mesh; an axis is as slow as on the slowest."""
    if any(size < 1 for size in sizes):
        raise RequestError(f"mesh {'x'.join(map(str, sizes))}: every axis needs a size of 1 or more")
    stride = math.prod(sizes) * innermost
    fewest = min(part.devices for part in parts_of(cluster))
    if stride > fewest:
        raise RequestError(f"mesh {'x'.join(map(str, sizes))} needs {stride} devices; there are {fewest}")
    axes = []
    for index, size in enumerate(sizes):
        stride //= size
        bandwidth = min(_all_gather_bandwidth(part.group(size, stride)) for part in parts_of(cluster))
        order: Order = "zigzag" if index in zigzag else "contiguous"
        name = f"axis{index}"
        has = _has_alltoall(cluster, size, stride) if alltoall == NODE else alltoall
        has = has if isinstance(has, bool) else has[index]
        axes.append(MeshAxis(name=name, size=size, stride=stride, bandwidth=bandwidth, order=order, alltoall=has))
    return Mesh(axes=tuple(axes))


def _has_alltoall(cluster: Machine, size: int, stride: int) -> bool:
    """Whether an axis lies inside a node, the innermost level of the network, on every kind of devices."""
    return size == 1 or all(
        [span.level for span in part.group(size, stride).spans] == [part.levels[0]] for part in parts_of(cluster)
    )


def _all_gather_bandwidth(group: Group) -> float:
    seconds = float(collective_time("all_gather", _PROBE_BYTES, group))
    return float(f"{_PROBE_BYTES / seconds:.3g}") if seconds else float(f"{_PROBE_BYTES:.3g}")
