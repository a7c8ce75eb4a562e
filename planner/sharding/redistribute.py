"""Redistribution: from one layout of a tensor to another, as a short sequence of collectives.

    S0,R ──all_gather(axis0)──> R,R ──slice(axis1, dim 1)──> R,S1

Each step changes the placement of one axis (all_to_all moves its cut from one dim to another; an axis without the
all-to-all takes an all_gather and a slice instead):

    step            from -> to     bytes a device moves / whole tensor (f = share held before, n = axis size)
    all_gather      S(d) -> R      f (n - 1)
    reduce_scatter  P -> S(d)      f (n - 1) / n
    all_reduce      P -> R         2 f (n - 1) / n
    all_to_all      S(d) -> S(e)   f (n - 1) / n
    reduce          P -> R         f, of one device: `root` has the sum, the others hold nothing valid (no path uses it)
    slice           R -> S(d)      nothing
    zero            R -> P         nothing: the first device of the axis keeps its copy, the others hold zeros
    pad             S(d) -> P      nothing: each device puts its piece into a tensor of zeros

Where the devices do not divide a dim of a parameter (`PaddedShape`), a step that cuts the dim adds zeros at its end,
and a step that joins it drops them.

Where several axes cut one dim, the earlier axis is the outer cut, so only the innermost cut of a dim can be taken away
and only a new innermost cut can be added. All layouts on the way divide evenly.

The path is the shortest one in the graph of layouts whose arcs weigh (moved bytes) / (bandwidth of the axis) plus a
little per step. It is found from the source to all layouts at once (Bellman 1958), when asked for: the
n = (dims + 2)^axes layouts are a grid with a dim per mesh axis, and as a step changes one axis, all steps along an axis
are one operation on the grid, for many sources together:

    label[.., to, ..] = min over from of  label[.., from, ..] + weight[from, .., to, ..]      until nothing changes

Labels are whole numbers, so that sums are exact and every process finds the same path, whatever it asked for before.
The high bits are the weight; the low bits are the sum of the positions of the layouts on the way, which decides between
paths of equal weight. Complexity: n axes (dims + 2) operations a round and source, and at most as many rounds as the
path has steps. Not suited for meshes of seven axes and more.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.errors import LayoutError
from planner.sharding.layout import (
    PARTIAL,
    REPLICATE,
    Layout,
    PaddedShape,
    Placement,
    divides,
    format_layout,
    local_shape,
    shard,
    shard_length,
    whole_shape,
)
from planner.sharding.mesh import Mesh

COLLECTIVES = frozenset({"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "reduce"})
Indices = NDArray[np.intp]

_HEAVIEST = 2**34  # weight of an all-reduce of a whole tensor over the slowest axis, before a step is added
_STEP = 16  # the little per step: more than what rounding does to a path, less than any real difference
_TIE_BITS = 21  # hold the sum of the positions of the layouts on a path
_NEVER = 2**61
_CELLS = 2**21  # of labels at once
_SMALL = 64  # layouts: up to so many, the paths from all layouts take hardly longer than the paths from one

# Placements on one axis are numbered: 0 replicated, 1 partial, 2 + d cut along dim d. The placements of an axis before
# and after a step give its kind; for each kind, how often a device moves (n - 1) / n of the message.
_REPLICATED, _PARTIAL, _CUT = range(3)
_NAMES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "slice", "zero", "pad")
_KIND = np.array([[-1, 5, 4], [2, -1, 1], [0, 6, 3]])
_ROUNDS = np.array([1, 1, 2, 1, 0, 0, 0])


@dataclass(frozen=True, slots=True)
class Step:
    """One step on one mesh axis.

    `dim` is the dim gathered, scattered or cut (-1 for all_reduce and zero); for all_to_all the dim that was cut,
    `to_dim` the dim that is cut afterwards. `fraction` is the size of the collective's message as a share of the
    whole tensor: the gathered result for all_gather, the tensor held before the step for all others. `zigzag` has those
    of the two dims whose pieces on the axis lie in zigzag order (`planner.sharding.zigzag`). `root` is the device of
    the axis that gets the sum of a reduce. `padding` are the zeros added to the dim that is cut. `extent` is the extent
    of the dim that is joined, without the zeros of its shards; -1 where these have none.
    """

    kind: str
    axis: int
    dim: int = -1
    to_dim: int = -1
    fraction: float = 1.0
    zigzag: tuple[int, ...] = ()
    root: int = -1
    padding: int = 0
    extent: int = -1


def is_view(step: Step) -> bool:
    """Whether the result of a step is a view of its operand: a contiguous cut."""
    return step.kind == "slice" and not step.zigzag


def redistribution(
    shape: Sequence[int], mesh: Mesh, source: Layout, target: Layout, sequences: Collection[int] = ()
) -> tuple[Step, ...]:
    """Steps that turn a tensor of `shape` in layout `source` into layout `target`. `sequences` are the dims that zigzag
    axes cut in zigzag order.

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
    steps = routes(mesh, cut_limits(shape, mesh.sizes)).path(source, target)
    if isinstance(shape, PaddedShape):
        steps = tuple(_with_padding(steps, shape, mesh.sizes, source))
    if not (sequences and mesh.zigzag):
        return steps
    return tuple(replace(step, zigzag=_in_order(step, mesh, sequences)) for step in steps)


def _with_padding(steps: Sequence[Step], shape: PaddedShape, sizes: tuple[int, ...], source: Layout) -> Iterator[Step]:
    """Steps of a parameter, with the zeros that they add or drop."""
    layout = source
    for step in steps:
        before, after = layout, _placed(layout, step)
        layout = after
        if all(whole_shape(shape, one, sizes) == tuple(shape) for one in (before, after)):
            yield step
            continue
        here, there = (local_shape(shape, one, sizes) for one in (before, after))
        (cut, joined), size = _dims_of(step), sizes[step.axis]
        padding = there[cut] * size - here[cut] if cut >= 0 else 0
        extent = there[joined] if joined >= 0 and here[joined] * size > there[joined] else -1
        sent = math.prod(here) * (size if step.kind == "all_gather" else 1)
        sent += sent // here[cut] * padding if padding else 0
        yield replace(step, fraction=sent / math.prod(shape), padding=padding, extent=extent)


def _dims_of(step: Step) -> tuple[int, int]:
    """The dim that a step cuts, and the dim that it joins; -1 for none."""
    if step.kind == "all_to_all":
        return step.to_dim, step.dim
    return (step.dim if step.kind in ("reduce_scatter", "slice") else -1), (
        step.dim if step.kind in ("all_gather", "pad") else -1
    )


def _placed(layout: Layout, step: Step) -> Layout:
    """A layout after a step."""
    cut, _ = _dims_of(step)
    placement = {"all_gather": REPLICATE, "all_reduce": REPLICATE, "zero": PARTIAL, "pad": PARTIAL}.get(step.kind)
    found: list[Placement] = list(layout)
    found[step.axis] = shard(cut) if placement is None else placement
    return tuple(found)


def _in_order(step: Step, mesh: Mesh, sequences: Collection[int]) -> tuple[int, ...]:
    return tuple(dim for dim in (step.dim, step.to_dim) if step.axis in mesh.zigzag and dim in sequences)


def cut_limits(shape: Sequence[int], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """What the paths depend on in a shape: per dim a bit mask of the sets of axes that divide it."""
    padded = isinstance(shape, PaddedShape)
    return tuple(_divisible_sets(extent, sizes, padded) for extent in shape)


@lru_cache(maxsize=4096)
def _divisible_sets(extent: int, sizes: tuple[int, ...], padded: bool) -> int:
    mask = 0
    for subset in range(1 << len(sizes)):
        cutting = [size for axis, size in enumerate(sizes) if subset >> axis & 1]
        if shard_length(extent, cutting) is not None if padded else extent % math.prod(cutting) == 0:
            mask |= 1 << subset
    return mask


Move = tuple[str, int, float]  # kind, axis and fraction of a step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hops:
    """Paths from n_s layouts to n_t layouts, all of the same length: (steps, n_s, n_t) positions in `moves`, and
    (steps + 1, n_s, n_t) the positions in the grid of the layouts on the way.

    A shorter path begins with moves that do nothing; their number is the position after the last move.
    """

    moves: tuple[Move, ...]
    taken: Indices
    layouts: NDArray[np.int32]


@lru_cache(maxsize=128)
def routes(mesh: Mesh, limits: tuple[int, ...]) -> "Routes":
    """Best paths between all layouts of tensors whose dims divide as `limits` says (see `cut_limits`)."""
    return Routes(mesh, limits)


class Routes:
    """Best paths between the n layouts of one kind of tensor; those from a layout are found when it is first asked for.

    A layout's position in the grid has its placements as digits. For arriving at layout v by a step on an axis that
    was placed as p before, `_weight[axis, p, v]` is what the step adds to the label, `_before[axis, p, v]` the layout
    it starts from and `_move[axis, p, v]` its position in `_moves`.
    """

    def __init__(self, mesh: Mesh, limits: tuple[int, ...]) -> None:
        axes, options = len(mesh.axes), len(limits) + 2
        count = options**axes
        self._digits = np.indices((options,) * axes).reshape(axes, count)
        self._strides = np.array([options ** (axes - 1 - axis) for axis in range(axes)], dtype=np.intp)
        legal, pieces = _legal(limits, self._digits), _pieces(mesh.sizes, self._digits)
        counts, held = np.unique(pieces, return_inverse=True)
        self._legal, self._rank = legal, np.cumsum(legal) - 1
        self._moves = tuple((kind, axis, 1.0 / int(c)) for kind in _NAMES for axis in range(axes) for c in counts)
        self._weight = np.full((axes, options, count), _NEVER)
        self._before = np.zeros((axes, options, count), dtype=np.intp)
        self._move = np.zeros((axes, options, count), dtype=np.intp)
        slowest = min((axis.bandwidth for axis in mesh.axes), default=1.0)
        came = np.arange(options)[:, None]
        for axis, line in enumerate(mesh.axes):
            now = self._digits[axis]
            before = np.arange(count) + (came - now) * self._strides[axis]
            kind = _KIND[np.minimum(came, _CUT), np.minimum(now, _CUT)]
            message = np.where(kind == 0, held, held[before])
            moved = _ROUNDS[kind] / counts[message] * ((line.size - 1) / line.size)
            weight = np.rint(moved * (slowest / line.bandwidth / 2 * _HEAVIEST)).astype(np.int64) + _STEP
            innermost = legal & ~((now >= _CUT) & (self._digits[axis + 1 :] == now).any(axis=0))
            allowed = innermost & innermost[before] & (came != now)
            if not line.alltoall:
                allowed &= kind != _NAMES.index("all_to_all")
            self._weight[axis][allowed] = ((weight << _TIE_BITS) + self._rank[before])[allowed]
            self._before[axis] = before
            self._move[axis] = (kind * axes + axis) * len(counts) + message
        self._row = np.full(count, -1)  # row of a start in the tables of paths found
        self._come = np.zeros((0, count), dtype=np.int32)
        self._made = np.zeros((0, count), dtype=np.int32)

    def positions(self, layouts: Sequence[Layout]) -> Indices:
        """Positions of layouts in the grid; the same for all tensors with as many dims."""
        digits = [_CUT + p.dim if p.dim >= 0 else int(p.kind == "partial") for layout in layouts for p in layout]
        places: Indices = np.array(digits, dtype=np.intp).reshape(len(layouts), -1) @ self._strides
        return places

    def path(self, source: Layout, target: Layout) -> tuple[Step, ...]:
        """Steps from one layout to another."""
        ends = self.positions([source, target])
        row = int(self._rows(ends[:1])[0])
        start, at = ends.tolist()
        found: list[Step] = []
        while at != start:
            before = self._come.item(row, at)
            found.append(self._step(before, at, self._moves[self._made.item(row, at)]))
            at = before
        return tuple(reversed(found))

    def _step(self, before: int, after: int, move: Move) -> Step:
        """The step of a move between two layouts, given by their positions."""
        kind, axis, fraction = move
        was, now = (self._digits.item(axis, layout) - _CUT for layout in (before, after))
        dim, to_dim = was if was >= 0 else max(now, -1), now if kind == "all_to_all" else -1
        return Step(kind, axis, dim, to_dim, fraction)

    def padded(self, hops: Hops, shape: PaddedShape, sizes: tuple[int, ...]) -> Hops:
        """The same paths for a parameter of this shape, with the padding that each step sends: a move for every pair of
        layouts."""
        count = len(self._rank)
        every = hops.layouts[:-1] * np.int64(count) + hops.layouts[1:]
        pairs, first, taken = np.unique(every, return_index=True, return_inverse=True)
        known = hops.taken.ravel()[first].tolist()
        moves, place = list[Move](), np.empty(len(pairs), dtype=np.intp)
        for number, (pair, move) in enumerate(zip(pairs.tolist(), known, strict=True)):
            before, after = divmod(pair, count)
            place[number] = len(moves) if before != after else -1
            if before != after:
                step = self._step(before, after, hops.moves[move])
                (step,) = _with_padding([step], shape, sizes, self._layout(before))
                moves.append((step.kind, step.axis, step.fraction))
        place[place < 0] = len(moves)
        return Hops(moves=tuple(moves), taken=place[taken].reshape(hops.taken.shape), layouts=hops.layouts)

    def _layout(self, position: int) -> Layout:
        """The layout at a position in the grid."""
        digits = self._digits[:, position].tolist()
        return tuple([shard(digit - _CUT) if digit >= _CUT else (REPLICATE, PARTIAL)[digit] for digit in digits])

    def hops(self, sources: Indices, targets: Indices) -> Hops:
        """The steps from each source to each target, given by their positions."""
        starts, row = sources[:, None], self._rows(sources)[:, None]
        at = np.repeat(targets[None, :], len(sources), axis=0)
        taken, passed = list[Indices](), [at]
        while (at != starts).any():
            taken.append(self._made[row, at])
            at = self._come[row, at]
            passed.append(at)
        steps = np.array(taken[::-1], dtype=np.intp).reshape(-1, *at.shape)
        used = np.zeros(len(self._moves) + 1, dtype=np.bool_)
        used[steps] = True
        used[-1] = True  # the move that does nothing
        number = np.cumsum(used) - 1
        moves = tuple(self._moves[m] for m in np.flatnonzero(used[:-1]).tolist())
        return Hops(moves=moves, taken=number[steps], layouts=np.array(passed[::-1], dtype=np.int32))

    def _rows(self, starts: Indices) -> Indices:
        """Rows of the tables with the paths from each start, which are found if they are not there yet."""
        if (self._row[starts] < 0).any():
            everywhere = len(self._rank) <= _SMALL
            missing = np.flatnonzero(self._legal) if everywhere else np.unique(starts[self._row[starts] < 0])
            chunk = max(1, _CELLS // math.prod(self._weight.shape[1:]))
            for low in range(0, len(missing), chunk):
                part = missing[low : low + chunk]
                before, move = self._search(part)
                self._row[part] = np.arange(len(part)) + len(self._come)
                self._come = np.concatenate([self._come, before], dtype=np.int32)
                self._made = np.concatenate([self._made, move], dtype=np.int32)
        return self._row[starts]

    def _search(self, starts: Indices) -> tuple[Indices, Indices]:
        """The best path from each start to each layout, (starts, n): the layout before it and the last move."""
        axes, _, count = self._weight.shape
        row = np.arange(len(starts))
        labels = np.full((len(starts), count), _NEVER)
        labels[row, starts] = -self._rank[starts]  # where a path starts is not on its way
        settled = False
        while not settled:
            known = labels.copy()
            for axis in range(axes):
                np.minimum(labels, self._arriving(labels, axis).min(axis=1), out=labels)
            settled = np.array_equal(labels, known)
        before = np.repeat(np.arange(count)[None, :], len(starts), axis=0)
        move = np.full(labels.shape, len(self._moves))
        for axis in reversed(range(axes)):  # of equal labels, the step on the first axis
            best = self._arriving(labels, axis) == labels[:, None]
            came = best.argmax(axis=1)
            here = best[row[:, None], came, np.arange(count)]
            before = np.where(here, np.take_along_axis(self._before[axis], came, axis=0), before)
            move = np.where(here, np.take_along_axis(self._move[axis], came, axis=0), move)
        return before, move

    def _arriving(self, labels: NDArray[np.int64], axis: int) -> NDArray[np.int64]:
        """Labels with which each layout is reached by a step on an axis, (starts, placements before, n)."""
        _, options, count = self._weight.shape
        inner = int(self._strides[axis])
        start = labels.reshape(len(labels), -1, options, 1, inner).transpose(0, 2, 1, 3, 4)
        found = start + self._weight[axis].reshape(options, -1, options, inner)
        arriving: NDArray[np.int64] = found.reshape(len(labels), options, count)
        return arriving


def _legal(limits: tuple[int, ...], digits: Indices) -> NDArray[np.bool_]:
    """Whether each layout of the grid divides evenly."""
    legal = np.ones(digits.shape[1], dtype=np.bool_)
    for dim, mask in enumerate(limits):
        allowed = np.array([bool(mask >> subset & 1) for subset in range(1 << len(digits))])
        bits = (digits == _CUT + dim) << np.arange(len(digits))[:, None]
        legal &= allowed[bits.sum(axis=0)]
    return legal


def _pieces(sizes: tuple[int, ...], digits: Indices) -> Indices:
    """Into how many pieces each layout of the grid cuts a tensor."""
    pieces = np.ones(digits.shape[1], dtype=np.intp)
    for axis, size in enumerate(sizes):
        pieces[digits[axis] >= _CUT] *= size
    return pieces
