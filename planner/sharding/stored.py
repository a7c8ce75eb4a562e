"""Stored layouts: how a parameter is kept between uses, apart from how its consumers compute with it.

Per mesh axis, one of

    weight  gradient  state
    R       R         R       a full copy everywhere; consumers on this axis all compute the same gradient
    R       P         R       data parallel: local sums, one all-reduce a step
    R       P         S(d)    ZeRO-1: local sums, one reduce-scatter a step, each device updates its piece
    R       R         S(d)    the update is sharded although every device has the whole gradient
    R       P         R       the same with states shared out by whole parameters (`Update.owned`): ZeRO-1 whose
                              pieces are parameters; one of the replicas has the state, updates and broadcasts
    R       S(d)      S(d)    ZeRO-2: the gradient of every micro-batch is reduce-scattered and added up in pieces
    S(d)    S(d)      S(d)    sharded throughout: tensor parallel where consumers use shards, ZeRO-3 where they gather

Rajbhandari et al. 2020 (ZeRO); Xu et al. 2020 (weight update sharding).

Beside its layout, a state and a weight have an offload target: none (the device), the memory of the host, or a disk. An
offloaded state comes to the device for the update of its parameter, an offloaded weight for each pass through its block
(Rajbhandari et al. 2021, ZeRO-Infinity).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hardware_profiles import Home
from planner.faults import Fault
from planner.sharding.layout import PARTIAL, REPLICATE, Layout, PaddedShape, Placement, divides, format_layout, shard

Option = tuple[Placement, Placement, Placement]
"""What one axis does to weight, gradient and state."""


COPIES: Option = (REPLICATE, PARTIAL, REPLICATE)
"""Data parallel copies of weight and state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredParameter:
    """Layouts in which a parameter is kept: the weight between steps, its gradient while micro-batches are accumulated,
    and the optimizer's state. A gradient that is `P` on an axis is reduced once a step. `state_home` is where the state
    is kept between updates, `weight_home` where the weight is kept between passes through its block.
    """

    weight: Layout
    gradient: Layout
    state: Layout
    state_home: Home = "device"
    weight_home: Home = "device"

    @property
    def offloaded(self) -> bool:
        """Whether the state is kept outside of the device."""
        return self.state_home != "device"

    @property
    def weight_offloaded(self) -> bool:
        """Whether the weight is kept outside of the device."""
        return self.weight_home != "device"

    @property
    def weight_words(self) -> str:
        """Layout and offload target of the weight: `S0`, `S0 host`."""
        layout = format_layout(self.weight)
        return f"{layout} {self.weight_home}".strip() if self.weight_offloaded else layout

    @property
    def on_device(self) -> "StoredParameter":
        """The same layouts with everything on the device."""
        return replace(self, state_home="device", weight_home="device")

    @property
    def state_words(self) -> str:
        """Layout and offload target of the state: `S0`, `S0 host`."""
        layout = format_layout(self.state)
        return f"{layout} {self.state_home}".strip() if self.offloaded else layout

    def on(self, axis: int) -> Option:
        """What one axis does."""
        return self.weight[axis], self.gradient[axis], self.state[axis]


def legal_stored(
    shape: Sequence[int], sizes: Sequence[int], trainable: bool, allowed: Sequence[Sequence[Option]] | None = None
) -> tuple[StoredParameter, ...]:
    """All stored layouts of a parameter, or those with only `allowed` options on every axis, in a fixed order, full
    copies first.

    A frozen parameter has no gradient to place.
    """
    if allowed is None:
        return _all_stored(shape if isinstance(shape, PaddedShape) else tuple(shape), tuple(sizes), trainable)
    return _grown(shape, sizes, allowed)


@lru_cache(maxsize=512)
def _all_stored(shape: tuple[int, ...], sizes: tuple[int, ...], trainable: bool) -> tuple[StoredParameter, ...]:
    """Cached, as it is asked for again for every micro-batch and for every mesh with these axes."""
    return _grown(shape, sizes, (stored_options(len(shape), trainable),) * len(sizes))


def _grown(
    shape: Sequence[int], sizes: Sequence[int], allowed: Sequence[Sequence[Option]]
) -> tuple[StoredParameter, ...]:
    """Equal layouts are one object, and each way to cut a parameter is checked once. A state is cut wherever its
    weight and gradient are, so these fit where the state fits. Padding is the exception: 62 padded by two are 4 x 2 x 2
    pieces, but never 2 x 2, as only a whole dim is padded."""
    layouts, fits = dict[Layout, Layout](), dict[Layout, bool]()
    padded = isinstance(shape, PaddedShape)
    grown: list[tuple[Layout, Layout, Layout]] = [((), (), ())]
    for axis in range(len(sizes)):
        longer = list[tuple[Layout, Layout, Layout]]()
        for weight, gradient, state in grown:
            for of_weight, of_gradient, of_state in allowed[axis]:
                cuts = (*weight, of_weight), (*gradient, of_gradient), (*state, of_state)
                for cut in cuts if padded else cuts[2:]:
                    if cut not in fits:
                        fits[cut] = divides(shape, cut, sizes[: axis + 1])
                    if not fits[cut]:
                        break
                else:
                    longer.append(cuts)
        grown = longer
    return tuple(
        [
            StoredParameter(
                weight=layouts.setdefault(weight, weight),
                gradient=layouts.setdefault(gradient, gradient),
                state=layouts.setdefault(state, state),
            )
            for weight, gradient, state in grown
        ]
    )


def with_homes(
    stored: Iterable[StoredParameter], states: Sequence[Home], weights: Sequence[Home]
) -> tuple[StoredParameter, ...]:
    """Stored layouts with their states and weights in each of these offload targets, in the order of the layouts."""
    layouts = dict.fromkeys(one.on_device for one in stored)
    return tuple(
        replace(one, state_home=state, weight_home=weight) for one in layouts for state in states for weight in weights
    )


def own_copies(axes: int) -> StoredParameter:
    """The layouts of a parameter that every device has for itself: its gradient is a term of a sum that is never
    taken."""
    whole = (REPLICATE,) * axes
    return StoredParameter(weight=whole, gradient=(PARTIAL,) * axes, state=whole)


def stored_options(rank: int, trainable: bool) -> tuple[Option, ...]:
    """What one axis can do to a parameter of `rank` dims, in the order of the table above."""
    options: list[Option] = [(REPLICATE, REPLICATE, REPLICATE)]
    if trainable:
        options.append((REPLICATE, PARTIAL, REPLICATE))
    for dim in range(rank):
        cut = shard(dim)
        options += [(REPLICATE, PARTIAL, cut), (REPLICATE, REPLICATE, cut)] if trainable else []
        options.append((cut, cut, cut))
        options += [(REPLICATE, cut, cut)] if trainable else []
    return tuple(options)


def owned_axes(stored: StoredParameter, sizes: Sequence[int]) -> tuple[int, ...]:
    """Axes of several devices that hold copies of weight and state, and add up their gradients once a step: where
    states are shared out by whole parameters, one of the copies owns the state. No axes where the state is cut finer
    than the weight on another axis, or weight or state is offloaded."""
    if stored.state != stored.weight or stored.offloaded or stored.weight_offloaded:
        return ()
    return tuple(axis for axis, size in enumerate(sizes) if size > 1 and stored.on(axis) == COPIES)


def stored_fault(stored: StoredParameter) -> Fault | None:
    """Why three layouts cannot be those of one parameter; None where they can."""
    reason = _stored_reason(stored)
    return None if reason is None else Fault(reason=reason)


def _stored_reason(stored: StoredParameter) -> str | None:
    for axis, (weight, gradient, state) in enumerate(zip(stored.weight, stored.gradient, stored.state, strict=True)):
        if weight == PARTIAL or state == PARTIAL:
            return f"weight and state cannot be partial (axis {axis})"
        if weight.is_shard and gradient != weight:
            return f"a weight cut as {weight} on axis {axis} needs a gradient cut alike, not {gradient}"
        if not weight.is_shard and gradient.is_shard and state != gradient:
            return f"a gradient cut as {gradient} on axis {axis} needs a state cut alike, not {state}"
        if weight.is_shard and state != weight:
            return f"a weight cut as {weight} on axis {axis} needs a state cut alike, not {state}"
    return None
