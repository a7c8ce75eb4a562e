"""Seconds of redistributions between many layouts of a tensor at once.

The paths of all pairs of layouts are followed together, one step at a time. Equal steps (same collective, axis and
share of the tensor) are priced once. Tensors that differ in size alone share their paths.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from costmodels import operator_time
from hardware_profiles import PYTORCH, Bytes, Cluster, Hidden
from planner.graph.operator_graph import DTYPE_BYTES, TensorType
from planner.limits import check
from planner.pricing.message import Message, message_seconds
from planner.sharding.layout import PADDING, Layout, PaddedShape
from planner.sharding.mesh import Mesh
from planner.sharding.redistribute import COLLECTIVES, Hops, Move, Routes, cut_limits, redistribution
from planner.sharding.update import PLAIN, Update

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Layouts = tuple[Layout, ...]
Paths = dict[tuple[int, ...], Routes]
"""Keyed by how the dims of tensors divide; equal on all meshes with the same `Mesh.routing`."""

LONG: Bytes = 2.0**50
"""A collective so large that its latency is negligible on any group. If the user composed the buckets, or all gradients
are in one bucket, every gradient is priced as its share of this. That is a lower bound, since nobody knows what shares
a bucket before all layouts are chosen. It leaves out the latency of the one bucket of a step."""


_WEIGHTS = "bfloat16"
"""The dtype of weights where software counts a bucket in parameters: it trains in 16 bits."""

_NARROW = 0.5
"""Bytes of weights and activations in fp8, relative to 16 bits."""

_COPIED = frozenset({"all_gather", "reduce_scatter"})
"""Collectives whose whole tensor is copied if software does so (`Software.copies_out`, for activations
`Software.rearranges`)."""

_PACKED = frozenset({"all_gather", "reduce_scatter", "all_reduce", "reduce"})
"""Collectives that the runtime coalesces, so that it copies tensors (`runtime.comm.collectives`): the inputs, and the
output of an all-gather. Other outputs that are cut along a dim other than the first are copied once more; that has no
price."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RedistributionMatrix:
    """Prices from each of n_s layouts to each of n_t, (n_s, n_t): seconds; the part of them for the `first` collective;
    the part for `copies` into and out of collectives; and whether anything is sent, so that the result has its own
    memory."""

    seconds: Array
    first: Array
    copies: Array
    sends: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricers:
    """Redistributions by kind of tensor, because software overlaps and buckets them differently: activations;
    parameters gathered for use; gradients reduced in their micro-batch; once a step accumulated gradients (`sums`) and
    new weights (`updated`), whose buckets a plan may decide instead of the software; and `matrices` that an update
    needs whole, one by one."""

    activations: "RedistributionPricer"
    parameters: "RedistributionPricer"
    gradients: "RedistributionPricer"
    sums: "RedistributionPricer"
    updated: "RedistributionPricer"
    matrices: "RedistributionPricer"

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        cluster: Cluster,
        update: Update = PLAIN,
        longest: tuple[Bytes, Bytes] = (LONG, LONG),
        paths: Paths | None = None,
        *,
        bare: bool = False,
    ) -> "Pricers":
        """The pricers for the software of a cluster.

        Buckets of a plan's update replace those of the software. Weights in coalesced all-gathers, and their gradients,
        are priced as their shares of collectives of the `longest` size, in bytes
        (`planner.plan.layout.block_gathers.longest_gather`): a lower bound. `paths` are known paths on such a mesh; new
        ones are added. `bare` prices are those of whole collectives, without overlap."""
        software = cluster.software
        shares = Hidden() if bare else software.hidden
        paths = {} if paths is None else paths
        known: dict[tuple[float, tuple[Bytes, ...], int, float, bool, bool, bool], RedistributionPricer] = {}

        def pricer(
            hidden: float,
            buckets: tuple[Bytes, ...],
            *,
            copied: int = software.copies_out,
            width: float = 1.0,
            uncut: bool = False,
            packed: bool = False,
            whole: bool = False,
        ) -> "RedistributionPricer":
            key = (hidden, buckets, copied, width, uncut, packed, whole)
            if key not in known:
                known[key] = RedistributionPricer(
                    mesh=mesh,
                    cluster=cluster,
                    exposed=1 - hidden,
                    buckets=buckets,
                    copied=copied,
                    width=width,
                    uncut=uncut,
                    packed=packed,
                    whole=whole,
                    _paths=paths,
                )
            return known[key]

        fp8 = software.products == "fp8"
        narrow = _NARROW if software.gathers_narrow and fp8 else 1.0
        inputs = _NARROW if software.gathers_inputs_narrow and fp8 else 1.0

        def full(element: Bytes, chosen: Bytes) -> tuple[Bytes, ...]:
            """Bytes of a full bucket by axis: as `chosen`, else as in the software, for this element size."""
            return tuple(chosen or software.bucket_bytes(axis.size, element) for axis in mesh.axes)

        there, back = longest if update.by_block else (0.0, 0.0)
        by_block, in_buckets = (own and software.name == PYTORCH.name for own in (update.by_block, update.bucketed))
        once = update.bucket_size or (LONG if update.composed or software.one_bucket else 0.0)
        copies = software.copies_gradients or int(software.copies_out)
        weight = DTYPE_BYTES[_WEIGHTS] * narrow
        use, sums = (DTYPE_BYTES[dtype] for dtype in (update.reduced_in(_WEIGHTS), update.summed_in(_WEIGHTS)))
        return cls(
            activations=pricer(shares.tensor, (), copied=software.rearranges, width=inputs),
            parameters=pricer(
                shares.gathers, full(weight, there), width=narrow, uncut=update.by_block, packed=by_block
            ),
            gradients=pricer(
                shares.reductions,
                full(use, back),
                copied=copies,
                uncut=update.by_block,
                packed=by_block,
                whole=software.reduces_whole,
            ),
            sums=pricer(
                shares.reductions, full(sums, once), copied=copies, packed=in_buckets, whole=software.reduces_whole
            ),
            updated=pricer(shares.gathers, full(weight, once), width=narrow, packed=in_buckets),
            matrices=pricer(0.0, (), copied=software.rearranges),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRoute:
    """One redistribution: its seconds, the part for its collectives, these in order, and the part for copies into and
    out of them."""

    seconds: float
    sent: float
    messages: tuple[Message, ...]
    copies: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SingleSteps:
    """Between n_s and n_t layouts, (n_s, n_t) each: whether at most one step is needed (`alone`), and its index in
    `moves` (kinds, axes and fractions); -1 for no step or several."""

    alone: NDArray[np.bool_]
    steps: NDArray[np.intp]
    moves: tuple[Move, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Asked:
    """Paths between two lists of layouts, and which of them send anything."""

    hops: Hops
    sends: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Places:
    """Positions of a list of layouts. The list is held so that its id stays valid."""

    layouts: Layouts
    positions: Indices
    content: bytes


@dataclass(kw_only=True, eq=False)
class RedistributionPricer:
    """Prices redistributions on one mesh of one cluster. Caches its prices.

    `exposed` is the share of the seconds of collectives that does not overlap with computation. A collective along an
    axis that is smaller than the full bucket there (`buckets`, one per axis) is sent in a bucket of that size, and is
    priced as its share of it. With `uncut`, the bucket is the sum of all tensors that go together, and they are also
    sharded together. For a collective of S bytes in t(S) seconds, a tensor of w of the W bytes, of which m are sent,
    takes at least

        (w / W) t(m W / w)          t is concave, and S is the sum of all m, so that t(S) >= the sum of these (Jensen)

    which is its share of a collective in which all tensors are sharded like it. Gathered and scattered tensors are
    `copied` so many times if software does so; this never overlaps, since the device does it. With `packed`, the device
    copies tensors into coalesced collectives, and copies out what others send. Gathered tensors have `width` times
    their bytes. `whole` sums are all-reduced even where each device keeps only its part of them.
    """

    mesh: Mesh
    cluster: Cluster
    exposed: float = 1.0
    buckets: tuple[Bytes, ...] = ()
    copied: int = 0
    width: float = 1.0
    uncut: bool = False
    packed: bool = False
    whole: bool = False
    _paths: Paths = field(default_factory=dict)
    _places: dict[tuple[int, int], _Places] = field(default_factory=dict)
    _asked: dict[tuple[tuple[int, ...], bytes, bytes], _Asked] = field(default_factory=dict)
    _matrices: dict[tuple[tuple[int, ...], bytes, bytes, int, Sequence[int]], RedistributionMatrix] = field(
        default_factory=dict
    )
    _prices: dict[tuple[str, int, float, float], float] = field(default_factory=dict)
    _routes: dict[tuple[tuple[int, ...], int, Sequence[int], Layout, Layout], PricedRoute] = field(default_factory=dict)

    def matrix(self, tensor: TensorType, sources: Layouts, targets: Layouts) -> RedistributionMatrix:
        """Prices from each source to each target. Lists are recognised by id, which is quick, or by their contents."""
        limits = cut_limits(tensor.shape, self.mesh.sizes)
        starts, ends = (self._placed(layouts, limits) for layouts in (sources, targets))
        key = (limits, starts.content, ends.content)
        padded = tensor.shape if self._pads(tensor.shape) else ()
        known = self._matrices.get((*key, tensor.nbytes, padded))
        if known is None:
            check()
            if key not in self._asked:
                self._asked[key] = self._follow(self._paths_of(limits), starts.positions, ends.positions)
            known = self._priced(self._padded(self._asked[key], tensor.shape), float(tensor.nbytes))
            self._matrices[*key, tensor.nbytes, padded] = known
        return known

    def single_steps(self, tensor: TensorType, sources: Layouts, targets: Layouts) -> "SingleSteps":
        """Where at most one step leads from each source to each target, and which step."""
        self.matrix(tensor, sources, targets)
        limits = cut_limits(tensor.shape, self.mesh.sizes)
        starts, ends = (self._placed(layouts, limits) for layouts in (sources, targets))
        hops = self._asked[limits, starts.content, ends.content].hops
        counted = np.array([*(self.mesh.sizes[axis] > 1 for _, axis, _ in hops.moves), False])
        counts = counted[hops.taken].sum(axis=0, dtype=np.intp)
        taken = np.where(counted[hops.taken], hops.taken, -1)
        alone = counts <= 1
        return SingleSteps(alone=alone, steps=np.where(alone, taken.max(axis=0, initial=-1), -1), moves=hops.moves)

    def pairs(self, tensor: TensorType, sources: Sequence[Layout], targets: Sequence[Layout]) -> RedistributionMatrix:
        """Prices from each source to the target in the same place: all arrays are (K,)."""
        found = self._paths_of(cut_limits(tensor.shape, self.mesh.sizes))
        starts, row = np.unique(found.positions(sources), return_inverse=True)
        ends, column = np.unique(found.positions(targets), return_inverse=True)
        asked = self._follow(found, starts, ends)
        every = self._priced(self._padded(asked, tensor.shape), float(tensor.nbytes))
        return RedistributionMatrix(
            seconds=every.seconds[row, column],
            first=every.first[row, column],
            copies=every.copies[row, column],
            sends=every.sends[row, column],
        )

    def seconds(self, tensor: TensorType, source: Layout, target: Layout) -> float:
        """Seconds of one redistribution."""
        return self.route(tensor, source, target).seconds

    def sends(self, tensor: TensorType, source: Layout, target: Layout) -> bool:
        """Whether a redistribution sends anything; if not, its result shares the memory of its input."""
        return bool(self.route(tensor, source, target).messages)

    def route(self, tensor: TensorType, source: Layout, target: Layout) -> PricedRoute:
        """One redistribution step by step: the same seconds, and its collectives."""
        padded = tensor.shape if self._pads(tensor.shape) else ()
        key = (cut_limits(tensor.shape, self.mesh.sizes), tensor.nbytes, padded, source, target)
        if key not in self._routes:
            steps = [
                step
                for step in redistribution(tensor.shape, self.mesh, source, target)
                if self.mesh.sizes[step.axis] > 1
            ]
            prices = [self._price(s.kind, s.axis, s.fraction * tensor.nbytes, float(tensor.nbytes)) for s in steps]
            copies = [self._copies(s.kind, s.axis, s.fraction * tensor.nbytes) for s in steps]
            self._routes[key] = PricedRoute(
                seconds=math.fsum(prices),
                sent=math.fsum(
                    price - copy
                    for price, copy, step in zip(prices, copies, steps, strict=True)
                    if step.kind in COLLECTIVES
                ),
                copies=math.fsum(copies),
                messages=tuple(
                    Message(kind=self._sent_as(step.kind), axis=step.axis, nbytes=step.fraction * tensor.nbytes)
                    for step in steps
                    if step.kind in COLLECTIVES
                ),
            )
        return self._routes[key]

    def _paths_of(self, limits: tuple[int, ...]) -> Routes:
        if limits not in self._paths:
            self._paths[limits] = Routes(self.mesh, limits)  # own paths: with many axes they are large
        return self._paths[limits]

    def _placed(self, layouts: Layouts, limits: tuple[int, ...]) -> _Places:
        key = (id(layouts), len(limits))
        if key not in self._places:
            positions = self._paths_of(limits).positions(layouts)
            self._places[key] = _Places(layouts=layouts, positions=positions, content=positions.tobytes())
        return self._places[key]

    def _follow(self, found: Routes, sources: Indices, targets: Indices) -> _Asked:
        hops = found.hops(sources, targets)
        sending = [kind in COLLECTIVES and self.mesh.sizes[axis] > 1 for kind, axis, _ in hops.moves]
        sends = np.logical_or.reduce(np.array([*sending, False])[hops.taken], axis=0)
        return _Asked(hops=hops, sends=sends)

    def _pads(self, shape: Sequence[int]) -> bool:
        """Whether any layout of a tensor has padding on this mesh: the outer cut of a dim pads it, no other."""
        cuts = ((extent, -extent % size) for extent in shape for size in self.mesh.sizes)
        return isinstance(shape, PaddedShape) and any(0 < missing <= PADDING * extent for extent, missing in cuts)

    def _padded(self, asked: _Asked, shape: Sequence[int]) -> _Asked:
        """The paths of a tensor, with the padding of its shards."""
        if not isinstance(shape, PaddedShape) or not self._pads(shape):
            return asked
        paths, sizes = self._paths_of(cut_limits(shape, self.mesh.sizes)), self.mesh.sizes
        return replace(asked, hops=paths.padded(asked.hops, shape, sizes))

    def _priced(self, asked: _Asked, nbytes: float) -> RedistributionMatrix:
        """The prices of paths."""
        moves, taken = asked.hops.moves, asked.hops.taken
        seconds, first, copies = (np.zeros(asked.sends.shape) for _ in range(3))
        sizes = [(kind, axis, fraction * nbytes) for kind, axis, fraction in moves]
        price = np.array([*[self._price(*one, nbytes) for one in sizes], 0.0])
        sent = price * np.array([*[kind in COLLECTIVES for kind, _, _ in moves], False])
        copying = np.zeros_like(price)
        if self.copied or self.packed:
            copying = np.array([*[self._copies(*one) for one in sizes], 0.0])
            sent -= copying
        for step in taken:
            copies += copying[step]
            seconds += price[step]
            first = np.where(first == 0.0, sent[step], first)
        return RedistributionMatrix(seconds=seconds, first=first, copies=copies, sends=asked.sends)

    def message_seconds(self, kind: str, axis: int, nbytes: float, whole: float | None = None) -> float:
        """Exposed seconds of one collective; its share, if it goes in a bucket. `whole`: the bytes of its tensor, if
        more than are sent."""
        return self._price(kind, axis, nbytes, nbytes if whole is None else whole)

    def sent_seconds(self, kind: str, axis: int, nbytes: float, whole: float | None = None) -> float:
        """The same without the copies into and out of the collective."""
        return self.message_seconds(kind, axis, nbytes, whole) - self._copies(kind, axis, nbytes)

    def _price(self, kind: str, axis: int, message: float, whole: float) -> float:
        """Seconds of a step, given the bytes of its collective, and of the whole tensor."""
        key = (kind, axis, message, whole if self.uncut else 0.0)
        if key not in self._prices:
            self._prices[key] = self._step_seconds(kind, axis, message, whole)
        return self._prices[key]

    def _step_seconds(self, kind: str, axis: int, message: float, whole: float) -> float:
        if kind in COLLECTIVES or kind == "broadcast":
            if kind == "all_gather":
                message, whole = message * self.width, whole * self.width
            bucket = self.buckets[axis] if self.buckets else 0.0
            sent = max(message, bucket)
            share = message / sent if sent else 1.0
            if self.uncut and 0 < message < sent:
                share = min(max(whole / bucket, share), 1.0)
                sent = message / share
            one = Message(kind=self._sent_as(kind), axis=axis, nbytes=sent)
            seconds = message_seconds(one, self.mesh, self.cluster)
            return self.exposed * seconds * share + self._copied(kind, axis, message)
        if kind == "slice" or self.mesh.sizes[axis] == 1:
            return 0.0  # a view
        return self._copy_seconds(message)  # zero and pad write a tensor of the size held before

    def _sent_as(self, kind: str) -> str:
        """The collective that software calls for this one."""
        return "all_reduce" if self.whole and kind == "reduce_scatter" else kind

    def _copies(self, kind: str, axis: int, message: float) -> float:
        """The part of the price of a collective for copies of the tensor, which has `width` times the bytes in an
        all-gather."""
        return self._copied(kind, axis, message * self.width if kind == "all_gather" else message)

    def _copied(self, kind: str, axis: int, message: float) -> float:
        if self.copied and kind in _COPIED:
            return self.copied * self._copy_seconds(message)
        if self.packed and kind in _PACKED and message < self.buckets[axis] and self.mesh.sizes[axis] > 1:
            there = 1 + 1 / self.mesh.sizes[axis] if kind == "all_gather" else 1.0
            return self._copy_seconds(there * message, kernels=0)  # one kernel copies all tensors together
        return 0.0

    def _copy_seconds(self, nbytes: float, kernels: int = 1) -> float:
        """Seconds of a copy, which reads and writes this many bytes."""
        device = self.cluster.device
        return operator_time(
            op_class="copy", flops=0.0, bytes_moved=2 * nbytes, dtype="fp32", device=device, kernels=kernels
        )
