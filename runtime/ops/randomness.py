"""Random numbers that do not depend on the plan: which elements a dropout drops.

Whether an element is dropped is a function of counters alone (Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3"). Generators have no state, so neither the order of calls nor the number of processes matters; a shard draws
its slice of the whole tensor's numbers, and a recomputed block draws the same numbers again.

    seed, step, micro-batch, operator ──64 bits──> key
    key, index of dim 0, 1, ...       ──64 bits──> state of a row       one per row
    state of a row, index in the row  ──32 bits──> number of an element in place, a few rows at a time

Each arrow folds one index into a state by adding a multiple of it and mixing; states are nested, so (1, 2) and (2, 1)
are unrelated. The 64-bit mixing is the finaliser of SplitMix64 (Steele, Lea, Flood 2014; constants: variant 13 of
Stafford 2011). The 32-bit mixing is `lowbias32` of Wellons 2018 (github.com/skeeto/hash-prospector, public domain),
with two changes: the upper half of the row's state is added between its two multiplications, so that rows which agree
in the lower half still differ; and its last shift is left out, because it mixes only lower bits, which hardly affect a
comparison with a threshold. Good enough for dropout; not for cryptography.
"""

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from planner.graph.operator_graph import Operator, OperatorGraph
from planner.graph.random_ops import CHANCES
from planner.sharding.layout import Layout
from planner.sharding.zigzag import zigzag_runs
from runtime.comm.device_mesh import RankMesh
from runtime.ops.slice_pass import SlicePass

_STRIDE = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: SplitMix64's increment
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # shift, multiplier
_LOW_STRIDE = 0x9E3779B9  # the upper half of the increment, odd
_LOWBIAS = (16, 0x7FEB352D, 15, 0x846CA68B)  # shift, multiplier, twice
_ALL = (1 << 64) - 1

_COLUMNS = 1 << 24  # elements of a row that 32 bits distinguish; the number of this piece goes into the state
_AT_ONCE = {"cpu": 1 << 18}  # by type of device, elements whose numbers are in memory at the same time, 8 bytes each:
_OTHERS_AT_ONCE = 1 << 22  # few enough for the cache, and as few launches as that allows


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The common part of all random numbers of one micro-batch. Steps and micro-batches count from 0. `slice` is the
    part of its sequence that is computed, if not all of it."""

    seed: int = 0
    step: int = 0
    micro_batch: int = 0
    slice: SlicePass | None = None

    def key(self, operator: int) -> int:
        """The 64-bit key of an operator with this code."""
        key = 0
        for number in (self.seed, self.step, self.micro_batch, operator):
            key = _mixed(key + _STRIDE * (number + 1) & _ALL)
        return key


FIRST = Draw()


Run = tuple[int, int]
"""Index of the first element, and the number of elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The piece of a tensor that a rank holds: for each dim the global index of its first element, and its extent. For
    dims with several runs of elements, `runs` has the (start, length) of each in order; `start` is that of the
    first."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    runs: tuple[tuple[int, tuple[Run, ...]], ...] = ()

    def parts(self) -> tuple[int, tuple["Region", ...]]:
        """A dim with several runs, and the regions that make up this one along it."""
        (dim, runs), *rest = self.runs
        return dim, tuple(
            replace(self, start=_with(self.start, dim, start), shape=_with(self.shape, dim, length), runs=tuple(rest))
            for start, length in runs
        )


def _with(extents: tuple[int, ...], dim: int, extent: int) -> tuple[int, ...]:
    return (*extents[:dim], extent, *extents[dim + 1 :])


def region_of(shape: tuple[int, ...], layout: Layout, place: RankMesh, sequences: Collection[int] = ()) -> Region:
    """This rank's region of a tensor of global `shape`; where the layout is partial, all of it. `sequences` are the
    dims that axes with their own order (zigzag) cut in that order."""
    held: list[tuple[Run, ...]] = [((0, extent),) for extent in shape]
    for axis, (placement, size) in enumerate(zip(layout, place.mesh.sizes, strict=True)):
        if placement.is_shard:
            extent = sum(length for _, length in held[placement.dim])
            coordinate = place.coordinate[axis]
            wanted: tuple[Run, ...] = ((coordinate * (extent // size), extent // size),)
            if axis in place.mesh.zigzag and placement.dim in sequences:
                wanted = zigzag_runs(extent, size, coordinate)
            held[placement.dim] = tuple(
                run for start, length in wanted for run in _cut(held[placement.dim], start, length)
            )
    return Region(
        start=tuple(runs[0][0] for runs in held),
        shape=tuple(sum(length for _, length in runs) for runs in held),
        runs=tuple((dim, runs) for dim, runs in enumerate(held) if len(runs) > 1),
    )


def _cut(runs: Sequence[Run], start: int, length: int) -> list[Run]:
    """The runs of `length` elements from `start` on, in a concatenation of runs."""
    found = []
    for first, count in runs:
        low, high = max(start, 0), min(start + length, count)
        if low < high:
            found.append((first + low, high - low))
        start -= count
    return found


def whole_region(shape: tuple[int, ...]) -> Region:
    """All of a tensor."""
    return Region(start=(0,) * len(shape), shape=tuple(shape))


def operator_code(name: str) -> int:
    """A 64-bit number for the name of an operator, because plans may number operators differently."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def drop_probability(op: Operator) -> float:
    """The dropout probability of an operator; 0 for one that drops nothing, or is switched off."""
    chance = CHANCES.get(op.op)
    return 0.0 if chance is None else chance.of(op.arguments, dict(op.keywords))


def dropping(graph: OperatorGraph) -> tuple[Operator, ...]:
    """The operators that drop elements, in call order."""
    return tuple(op for op in graph.operators if drop_probability(op) > 0)


def keep_mask(key: int, region: Region, probability: float, device: torch.device) -> torch.Tensor:
    """The kept elements of a region, bool, of its shape: True with probability 1 - `probability`."""
    if region.runs:
        dim, parts = region.parts()
        return torch.cat([keep_mask(key, part, probability, device) for part in parts], dim=dim)
    keep = torch.empty(region.shape, dtype=torch.bool, device=device)
    if keep.numel() == 0 or probability >= 1.0:
        return keep.zero_()
    threshold = round(probability * 2**32) - 2**31  # numbers are int32, from -2**31
    *outer, columns = region.shape or (1,)
    *first, column = region.start or (0,)
    rows = _row_states(key, first, outer, device)
    flat = keep.view(rows.numel(), columns)
    at = column
    while at < column + columns:
        stop = min(column + columns, (at // _COLUMNS + 1) * _COLUMNS)
        states = _fold(rows, at // _COLUMNS)
        inside = torch.arange(at % _COLUMNS, at % _COLUMNS + stop - at, dtype=torch.int32, device=device)
        step = max(1, _AT_ONCE.get(device.type, _OTHERS_AT_ONCE) // (stop - at))
        for row in range(0, len(states), step):
            numbers = _numbers(states[row : row + step], inside)
            torch.ge(numbers, threshold, out=flat[row : row + step, at - column : stop - column])
        at = stop
    return keep


def drop(tensor: torch.Tensor, keep: torch.Tensor, probability: float) -> torch.Tensor:
    """The kept elements divided by 1 - probability, zero elsewhere; `keep` broadcasts. Autograd saves only `keep`, one
    byte per element."""
    dropped: torch.Tensor = _Drop.apply(tensor, keep, 0.0 if probability >= 1.0 else 1.0 / (1.0 - probability))  # type: ignore[no-untyped-call]
    return dropped


class _Drop(torch.autograd.Function):
    """Multiplication with a mask that is saved as bool; PyTorch's own CPU kernel saves it in the tensor's dtype."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        dropped = tensor * keep  # a new tensor: kept results of a recomputed block must not be overwritten
        return dropped.mul_(scale)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return (gradients[0] * keep).mul_(ctx.scale), None, None


def _row_states(key: int, first: list[int], extents: list[int], device: torch.device) -> torch.Tensor:
    """The states of all rows, (product of `extents`,) int64: the indices of the outer dims folded into the key."""
    states = torch.full((1,), _signed(key, 64), dtype=torch.int64, device=device)
    for start, extent in zip(first, extents, strict=True):
        index = torch.arange(start + 1, start + extent + 1, dtype=torch.int64, device=device)
        states = _mix_rows((states.unsqueeze(1) + index * _signed(_STRIDE, 64)).view(states.numel() * extent))
    assert states.numel() == math.prod(extents)
    return states


def _fold(states: torch.Tensor, number: int) -> torch.Tensor:
    return _mix_rows(states + _signed(_STRIDE * (number + 1) & _ALL, 64))


def _mix_rows(states: torch.Tensor) -> torch.Tensor:
    """`_mixed` of every state, in place."""
    for shift, multiplier in _MIX:
        upper = states >> shift
        upper &= (1 << 64 - shift) - 1  # an arithmetic shift copies the sign
        states ^= upper
        states *= _signed(multiplier, 64)
    return states


def _mixed(state: int) -> int:
    for shift, multiplier in _MIX:
        state = (state ^ state >> shift) * multiplier & _ALL
    return state


def _numbers(states_R: torch.Tensor, inside_C: torch.Tensor) -> torch.Tensor:
    """Uniform int32 numbers (R, C) from the states of R rows and C indices inside a row."""
    lower = states_R.to(torch.int32).unsqueeze(1)  # takes the lower bits
    upper = (states_R >> 32).to(torch.int32).unsqueeze(1)
    numbers = inside_C * _signed(_LOW_STRIDE, 32) + lower
    scratch = torch.empty_like(numbers)
    first, multiplier, second, last_multiplier = _LOWBIAS
    _shifted_xor(numbers, first, scratch)
    numbers *= _signed(multiplier, 32)
    numbers += upper
    _shifted_xor(numbers, second, scratch)
    numbers *= _signed(last_multiplier, 32)
    return numbers


def _shifted_xor(numbers: torch.Tensor, shift: int, scratch: torch.Tensor) -> None:
    torch.bitwise_right_shift(numbers, shift, out=scratch)
    scratch &= (1 << 32 - shift) - 1
    numbers ^= scratch


def _signed(number: int, bits: int) -> int:
    """The number as a signed integer of `bits` bits, as torch stores it."""
    return number - (1 << bits) if number >> bits - 1 else number
