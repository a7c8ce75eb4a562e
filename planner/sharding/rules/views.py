"""Rules of operators that move no values, or only pick and join them: the same elements under other dims."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from planner.graph.call import Call
from planner.graph.operator_graph import TensorType
from planner.sharding.rule import Dims, FactorKind, Rule, Work
from planner.sharding.rules.spec import FactorTable, RuleSpec, dims_of, integers, normal_dim


@final
@dataclass(frozen=True, kw_only=True)
class Reshape(RuleSpec):
    """The same elements in the same order under another shape: dims are merged and split.

    The common refinement of the two shapes gives the factors: (b s) h d -> b s (h d). Where no refinement exists (6 x 4
    -> 8 x 3) the dims concerned are blocked. `copies` says whether the operator copies an operand that does not lie in
    one piece.
    """

    copies: bool = True

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        source, target = call.operands[0], call.results[0]
        source_dims, target_dims = _refine(table, source.shape, target.shape)
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=(source_dims,),
            results=(target_dims,),
            op_class="copy" if self.copies and not source.contiguous else "view",
            local_form="reshape",
        )


def _refine(table: FactorTable, source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims]:
    names = iter(range(1_000_000))
    left: list[tuple[int, ...]] = [()] * len(source)
    right: list[tuple[int, ...]] = [()] * len(target)
    for group in _groups(source, target):
        lows, highs = (
            [dim for dim in dims if shape[dim] != 1] for dims, shape in zip(group, (source, target), strict=True)
        )
        cuts = sorted({math.prod(source[d] for d in lows[: k + 1]) for k in range(len(lows))}
                      | {math.prod(target[d] for d in highs[: k + 1]) for k in range(len(highs))})  # fmt: skip
        if all(b % a == 0 for a, b in itertools.pairwise(cuts)):
            parts = [b // a for a, b in zip([1, *cuts], cuts, strict=False)]
            factors = [(table.add(f"d{next(names)}", part), cut) for part, cut in zip(parts, cuts, strict=True)]
            for dims, shape, out in ((lows, source, left), (highs, target, right)):
                low = 1
                for dim in dims:
                    high = low * shape[dim]
                    out[dim] = tuple(index for index, cut in factors if low < cut <= high)
                    low = high
        else:
            for dims, shape, out in ((lows, source, left), (highs, target, right)):
                for dim in dims:
                    out[dim] = (table.add(f"d{next(names)}", shape[dim], FactorKind.BLOCKED),)
    return tuple(left), tuple(right)


def _groups(source: Sequence[int], target: Sequence[int]) -> Iterable[tuple[list[int], list[int]]]:
    """Smallest runs of dims of the two shapes with equal products."""
    i = j = 0
    while i < len(source) or j < len(target):
        lows, highs, low, high = [], [], 1, 1
        while True:
            if (low <= high and i < len(source)) or j >= len(target):
                low *= source[i]
                lows.append(i)
                i += 1
            else:
                high *= target[j]
                highs.append(j)
                j += 1
            if low == high and (lows or highs) and (low > 1 or (i >= len(source) and j >= len(target))):
                break
            if i >= len(source) and j >= len(target):
                break
        yield lows, highs


@final
@dataclass(frozen=True, kw_only=True)
class Permute(RuleSpec):
    """Dims in another order: transpose (two dims at `positions` 1 and 2), permute (a list), or the matrix transpose."""

    form: str

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        source = dims_of(table, call.operands[0].shape)
        rank = len(source)
        order = list(range(rank))
        if self.form == "permute":
            order = [normal_dim(dim, rank) for dim in integers(call.argument(1, "dims"))]
        else:
            first, second = (
                (call.integer(1, "dim0", 0), call.integer(2, "dim1", 1))
                if self.form == "transpose"
                else (rank - 2, rank - 1)
            )
            if rank >= 2:
                first, second = normal_dim(first, rank), normal_dim(second, rank)
                order[first], order[second] = order[second], order[first]
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=(source,),
            results=(tuple(source[dim] for dim in order),),
            op_class="view",
        )


@final
@dataclass(frozen=True, kw_only=True)
class AlongDim(RuleSpec):
    """Operators that pick, split or join along dims: those dims are blocked unless they are unchanged, all others pass
    through.

    `dim` is the position, the name and the default of the argument that names the dim. `drops` says that the results
    lack it (select, unbind), `second_drops` that the second operand lacks it (a slice that is written), `adds` that the
    results have a new one (stack), `spells_extent` that an argument gives the extent of the dim, which then cannot be
    split even where nothing changes (narrow). `scratch` tensors like the first operand live during the backward pass.
    """

    dim: tuple[int, str, int]
    op_class: str = "copy"
    spells_extent: bool = False
    drops: bool = False
    second_drops: bool = False
    adds: bool = False
    saved_results: tuple[int, ...] = ()
    scratch: float = 0.0

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        shape = call.operands[0].shape
        dim = normal_dim(call.integer(*self.dim), len(shape) + self.adds)
        rest = [extent for at, extent in enumerate(shape) if self.adds or at != dim]
        whole = not (self.drops or self.adds or self.spells_extent) and all(
            tensor.shape == shape for tensor in (*call.operands, *call.results)
        )
        kind = FactorKind.PARALLEL if whole else FactorKind.BLOCKED
        passing = [(table.add(f"d{at}", extent),) if extent != 1 else () for at, extent in enumerate(rest)]

        def dims(tensor: TensorType, has: bool, name: str) -> Dims:
            if not has:
                return tuple(passing)
            extent = tensor.shape[dim]
            own = (table.add("along" if whole else name, extent, kind),) if extent != 1 else ()
            return (*passing[:dim], own, *passing[dim:])

        operands = tuple(
            dims(tensor, not self.adds and not (self.second_drops and i == 1), f"in{i}")
            for i, tensor in enumerate(call.operands)
        )
        results = tuple(dims(tensor, not self.drops, f"out{i}") for i, tensor in enumerate(call.results))
        points, element = tuple(factor for own in operands[0] for factor in own), call.operands[0].element_bytes
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=operands,
            results=results,
            op_class=self.op_class,
            saved_results=self.saved_results,
            scratch=(Work(coefficient=self.scratch * element, factors=points),) if self.scratch else (),
        )


@final
@dataclass(frozen=True, kw_only=True)
class Pad(RuleSpec):
    """Dims that get something in front or behind (position 1, from the last dim on) are blocked, all others pass."""

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        pads = integers(call.argument(1, "pad"))
        rank = len(call.operands[0].shape)
        padded = {rank - 1 - at // 2 for at, count in enumerate(pads) if count}
        operand, result = _sides(table, call, padded, "in"), _sides(table, call, padded, "out")
        return Rule(op=call.op, factors=table.freeze(), operands=(operand,), results=(result,), op_class="copy")


def _sides(table: FactorTable, call: Call, changed: set[int], side: str) -> Dims:
    """Dims of the operand ("in") or the result ("out"); the dims that change are blocked."""
    shape = (call.operands if side == "in" else call.results)[0].shape
    return tuple(
        ()
        if extent == 1
        else (table.add(f"{side}{dim}", extent, FactorKind.BLOCKED),)
        if dim in changed
        else (table.add(f"d{dim}", extent),)
        for dim, extent in enumerate(shape)
    )


@final
@dataclass(frozen=True, kw_only=True)
class RepeatEach(RuleSpec):
    """repeat_interleave: every element of a dim (position 2) n times (position 1) in a row, d -> (d n); without a dim,
    those of the flat tensor. A dim whose new extent is spelled out (`output_size`) cannot be split."""

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        source, times = call.operands[0].shape, call.integer(1, "repeats", 1)
        dims, flat = dims_of(table, source), call.argument(2, "dim") is None
        copies = (table.add("n", times, FactorKind.BLOCKED),) if times != 1 else ()
        if call.argument(3, "output_size") is not None:
            for at in range(len(source)) if flat else (normal_dim(call.integer(2, "dim", 0), len(source)),):
                if dims[at]:
                    table.set_kind(f"d{at}", FactorKind.BLOCKED)
        if flat:
            result: Dims = ((*(factor for factors in dims for factor in factors), *copies),)
        else:
            dim = normal_dim(call.integer(2, "dim", 0), len(source))
            result = (*dims[:dim], (*dims[dim], *copies), *dims[dim + 1 :])
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=(dims,),
            results=(result,),
            op_class="copy",
        )


@final
@dataclass(frozen=True, kw_only=True)
class Tile(RuleSpec):
    """repeat: the whole tensor several times along each dim (position 1), new dims in front.

    Repeated dims are blocked, except dims of extent 1, of which each device makes as many copies as it needs.
    """

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        shape, times = call.results[0].shape, integers(call.argument(1, "repeats"))
        new = len(shape) - len(call.operands[0].shape)
        source = (1,) * new + call.operands[0].shape
        repeated = {dim for dim, count in enumerate(times) if count != 1 and source[dim] != 1}
        results = tuple(
            ()
            if extent == 1
            else (table.add(f"out{dim}", extent, FactorKind.BLOCKED),)
            if dim in repeated
            else (table.add(f"d{dim}", extent),)
            for dim, extent in enumerate(shape)
        )
        operand = tuple(
            (table.add(f"in{dim}", extent, FactorKind.BLOCKED),)
            if dim in repeated
            else results[dim]
            if extent != 1
            else ()
            for dim, extent in enumerate(source)
        )[new:]
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=(operand,),
            results=(results,),
            op_class="copy",
            local_form="tiled",
        )
