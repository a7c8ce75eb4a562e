"""Redistribution: from one layout of a tensor to another, as a short sequence of collectives.

    S0,R ──all_gather(axis0)──> R,R ──slice(axis1, dim 1)──> R,S1

Each step changes the placement of one axis (all_to_all moves its cut from one dim to another):

    step            from -> to     moves, a device, in units of the whole tensor (f = share held before, n = axis size)
    all_gather      S(d) -> R      f (n - 1)
    reduce_scatter  P -> S(d)      f (n - 1) / n
    all_reduce      P -> R         2 f (n - 1) / n
    all_to_all      S(d) -> S(e)   f (n - 1) / n
    slice           R -> S(d)      nothing
    zero            R -> P         nothing: the first device of the axis keeps its copy, the others hold zeros
    pad             S(d) -> P      nothing: each device puts its piece into a tensor of zeros

Where several axes cut one dim, the earlier axis is the outer cut, so only the innermost cut of a dim can be taken away
and only a new innermost cut can be added. The path is the shortest one in the graph of layouts whose arcs weigh (moved
bytes) / (bandwidth of the axis) plus a little per step: Floyd and Warshall over all layouts, in a fixed order, so that
every process finds the same path. All layouts on the way divide evenly. Complexity: n = (dims + 2)^axes layouts, n^3
in n vectorised rounds, once per mesh and kind of shape. Not good for: meshes of four axes and more.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.errors import LayoutError
from planner.sharding.layout import (
    PARTIAL,
    REPLICATE,
    Layout,
    Placement,
    divides,
    format_layout,
    local_fraction,
    shard,
)
from planner.sharding.mesh import Mesh

COLLECTIVES = frozenset({"all_gather", "reduce_scatter", "all_reduce", "all_to_all"})
_STEP_WEIGHT = 1e-18  # seconds per byte: only breaks ties between paths that move the same


@dataclass(frozen=True, slots=True)
class Step:
    """One step on one mesh axis.

    `dim` is the dim gathered, scattered or cut (-1 for all_reduce and zero); for all_to_all the dim that was cut,
    `to_dim` the dim that is cut afterwards. `fraction` is the size of the collective's message as a share of the
    whole tensor: the gathered result for all_gather, the tensor held before the step for all others.
    """

    kind: str
    axis: int
    dim: int = -1
    to_dim: int = -1
    fraction: float = 1.0


def redistribution(shape: Sequence[int], mesh: Mesh, source: Layout, target: Layout) -> tuple[Step, ...]:
    """Steps that turn a tensor of `shape` in layout `source` into layout `target`.

    Raises LayoutError where a layout does not fit the shape. Any layout of the right rank can be reached from any
    other.
    """
    for layout in (source, target):
        if len(layout) != len(mesh.axes) or not divides(shape, layout, mesh.sizes):
            raise LayoutError(
                f"layout {format_layout(layout)} is not one of a tensor of shape {tuple(shape)}"
                f" on mesh {'x'.join(map(str, mesh.sizes))}"
            )
    if source == target:
        return ()
    return routes(mesh, cut_limits(shape, mesh.sizes)).path(source, target)


def cut_limits(shape: Sequence[int], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """All of a shape that the paths depend on: per dim a bit mask of the sets of axes that divide it."""
    return tuple(_divisible_sets(extent, sizes) for extent in shape)


@lru_cache(maxsize=4096)
def _divisible_sets(extent: int, sizes: tuple[int, ...]) -> int:
    mask = 0
    for subset in range(1 << len(sizes)):
        count = 1
        for axis, size in enumerate(sizes):
            if subset >> axis & 1:
                count *= size
        if extent % count == 0:
            mask |= 1 << subset
    return mask


@dataclass(frozen=True, kw_only=True, eq=False)
class Routes:
    """Best paths between all n layouts that the tensors of one kind can have.

    `onward[i, j]` is the layout after the first step from i towards j; `arc[i, k]` the position in `steps` of the step
    from i to its neighbour k.
    """

    layouts: tuple[Layout, ...]
    steps: tuple[Step, ...]
    onward: NDArray[np.intp]
    arc: NDArray[np.intp]

    def position(self, layout: Layout) -> int:
        """Index of a layout in `layouts`."""
        return self.layouts.index(layout)

    def path(self, source: Layout, target: Layout) -> tuple[Step, ...]:
        """Steps from one layout to another."""
        at, goal = self.position(source), self.position(target)
        found = []
        while at != goal:
            after = int(self.onward[at, goal])
            found.append(self.steps[self.arc[at, after]])
            at = after
        return tuple(found)


@lru_cache(maxsize=4096)
def routes(mesh: Mesh, limits: tuple[int, ...]) -> Routes:
    """Best paths between all layouts of tensors whose dims divide as `limits` says (see `cut_limits`)."""
    options = [REPLICATE, PARTIAL, *(shard(dim) for dim in range(len(limits)))]
    every: Iterator[Layout] = itertools.product(options, repeat=len(mesh.axes))
    layouts = tuple(layout for layout in every if _divides(limits, layout))
    place = {layout: i for i, layout in enumerate(layouts)}
    count = len(layouts)
    weight = np.full((count, count), np.inf)
    np.fill_diagonal(weight, 0.0)
    arc = np.full((count, count), -1, dtype=np.intp)
    steps: list[Step] = []
    for i, layout in enumerate(layouts):
        for step, arrived, moved in _steps(mesh, limits, layout):
            j = place[arrived]
            weight[i, j] = moved / mesh.axes[step.axis].bandwidth + _STEP_WEIGHT
            arc[i, j] = len(steps)
            steps.append(step)
    onward = np.tile(np.arange(count), (count, 1))
    for k in range(count):
        through = weight[:, k, None] + weight[None, k, :]
        better = through < weight
        weight[better] = through[better]
        onward = np.where(better, onward[:, k, None], onward)
    return Routes(layouts=layouts, steps=tuple(steps), onward=onward, arc=arc)


def _divides(limits: tuple[int, ...], layout: Layout) -> bool:
    for dim, mask in enumerate(limits):
        cut = shard(dim)
        subset = sum(1 << axis for axis, placement in enumerate(layout) if placement == cut)
        if not mask >> subset & 1:
            return False
    return True


def _steps(mesh: Mesh, limits: tuple[int, ...], layout: Layout) -> Iterator[tuple[Step, Layout, float]]:
    """Every legal step from a layout: the step, the layout after it, and the share of the tensor a device moves."""
    held = local_fraction(layout, mesh.sizes)
    for axis, placement in enumerate(layout):
        size = mesh.sizes[axis]
        remote = (size - 1) / size
        if placement == PARTIAL:
            yield Step("all_reduce", axis, fraction=held), _replace(layout, axis, REPLICATE), 2 * held * remote
            for dim in _new_cuts(limits, layout, axis):
                step = Step("reduce_scatter", axis, dim, fraction=held)
                yield step, _replace(layout, axis, shard(dim)), held * remote
        elif placement == REPLICATE:
            for dim in _new_cuts(limits, layout, axis):
                yield Step("slice", axis, dim, fraction=held), _replace(layout, axis, shard(dim)), 0.0
            yield Step("zero", axis, fraction=held), _replace(layout, axis, PARTIAL), 0.0
        elif shard(placement.dim) not in layout[axis + 1 :]:
            gathered = held * size
            step = Step("all_gather", axis, placement.dim, fraction=gathered)
            yield step, _replace(layout, axis, REPLICATE), gathered * remote
            for dim in _new_cuts(limits, _replace(layout, axis, REPLICATE), axis):
                if dim != placement.dim:
                    step = Step("all_to_all", axis, placement.dim, dim, fraction=held)
                    yield step, _replace(layout, axis, shard(dim)), held * remote
            step = Step("pad", axis, placement.dim, fraction=held)
            yield step, _replace(layout, axis, PARTIAL), 0.0


def _new_cuts(limits: tuple[int, ...], layout: Layout, axis: int) -> Iterator[int]:
    """Dims that `axis` can cut as the innermost cut, given the cuts of the other axes."""
    for dim, mask in enumerate(limits):
        cut = shard(dim)
        if cut in layout[axis + 1 :]:
            continue
        subset = 1 << axis
        for other, placement in enumerate(layout):
            if placement == cut:
                subset |= 1 << other
        if mask >> subset & 1:
            yield dim


def _replace(layout: Layout, axis: int, placement: Placement) -> Layout:
    return (*layout[:axis], placement, *layout[axis + 1 :])
