"""Rules of convolutions and pooling: what slides a stencil over the spatial dims.

A spatial dim is split together with that of the results, h@ph: a piece of the results reads the piece of the input in
the same place, and edges of the neighbours (`planner.sharding.halo`), which the implementation sends.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from planner.errors import RuleError
from planner.graph.call import Call
from planner.sharding.halo import Halo, Stencil, halos, stencils
from planner.sharding.rule import Dims, FactorKind, InnerCollective, Rule, Work
from planner.sharding.rules.spec import FactorTable, RuleSpec, Saves, integers, present

SPATIAL = ("d", "h", "w")
"""Names of spatial dims, the last ones where there are fewer; dims of results have a p in front, of kernels a k."""

Indices = tuple[int, ...]
Halos = Sequence[Halo | None]


def halo_factor(name: str) -> str:
    """Name of the factor that splits a spatial dim together with that of the results."""
    return f"{name}@p{name}"


@final
@dataclass(frozen=True, kw_only=True)
class Convolution(RuleSpec):
    """`n (g i) h w, (g o) i kh kw, (g o) -> n (g o) ph pw`, with any number of spatial dims.

    Groups g are parallel, and the local call has the local number of them; input channels i are a reduction. The
    kernel is blocked. As an implicit GEMM it has the rows n ph pw, the columns o and the depth i kh kw, so its work is
    2 n (g o) ph pw i kh kw.

    A `transposed` one, `n (g i) h w, (g i) o kh kw, (g o) -> n (g o) ph pw`, is the gradient of a convolution with
    respect to its input: every element of the input is spread over kh kw elements of the result. It has the rows n h w,
    the columns o kh kw and the depth i. Its pixels are cut only where no two elements are spread over the same result.
    """

    spatial: int
    transposed: bool = False

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        source, weight, result = call.operands[0], call.operands[1], call.results[0]
        groups = call.integer(6, "groups", 1)
        if len(source.shape) not in (self.spatial + 1, self.spatial + 2):
            raise RuleError(f"{call.op}: an input of shape {source.shape} does not have {self.spatial} spatial dims")
        batch = () if len(source.shape) == self.spatial + 1 else (table.add_unless_one("n", source.shape[0]),)
        g = table.add_unless_one("g", groups)
        made, read = weight.shape[0] // groups, weight.shape[1]
        if self.transposed:
            made, read = read, made
        o, i = table.add_unless_one("o", made), table.add_unless_one("i", read, FactorKind.REDUCTION)
        extents = [tensor.shape[-self.spatial :] for tensor in (source, weight, result)]
        outside, kernel, inside = (
            _spatial(table, prefix, one) for prefix, one in zip(("", "k", "p"), extents, strict=True)
        )
        operands: tuple[Dims, ...] = ((*batch, (*g, *i), *outside), ((*g, *o), i, *kernel), ((*g, *o),))
        rows, columns, depth = (*_all(batch), *_all(inside)), o, (*i, *_all(kernel))
        slides = _SLIDES
        if self.transposed:
            operands = operands[0], ((*g, *i), o, *kernel), operands[2]
            rows, columns, depth = (*_all(batch), *_all(outside)), (*o, *_all(kernel)), i
            slides = _SPREADS
        over = stencils(extents[1], *(call.argument(at, name, default) for at, name, default in slides))
        edges = _apart if self.transposed else halos
        inner = _cut(table, edges(over, extents[0], extents[2]), operands[0], source.element_bytes)
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=operands[: len(call.operands)],
            results=((*batch, (*g, *o), *inside),),
            op_class="matmul",
            work=(Work(coefficient=2.0, factors=(*rows, *g, *columns, *depth)),),
            addends=(2,) if len(call.operands) > 2 else (),
            saves=((0, (0, 1)), (1, (0, 1))),  # all, whichever gradient is asked for
            roles=(("rows", rows), ("columns", columns), ("depth", depth), ("batch", g)),
            inner=inner,
            inner_scratch=_copied(inner, operands[0], source.element_bytes),
            joined=bool(inner),
        )


_SLIDES = ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
_SPREADS = ((3, "stride", 1), (4, "padding", 0), (7, "dilation", 1))
"""Arguments of a convolution that say how its stencil slides: position, name, default; the same of a transposed one."""


@final
@dataclass(frozen=True, kw_only=True)
class Pool(RuleSpec):
    """Pooling over trailing spatial dims; samples and channels pass through.

    Spatial dims are blocked, with two exceptions. An `adaptive` call that takes the mean of all elements is a mean of
    the means of pieces, and keeps nothing. A stencil may `slide` over them that takes a "max" or a "mean" of what it
    reads. Work counts the elements that are read, overlaps once. Autograd keeps `saved_extra_bytes` per element of the
    result.
    """

    spatial: int = 2
    saves: Saves = ((0, (0,)),)
    saved_results: tuple[int, ...] = ()
    saved_extra_bytes: float = 0.0
    adaptive: bool = False
    slides: str = ""

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        element = call.operands[0].element_bytes
        source, result = call.operands[0].shape, call.results[0].shape
        lead = len(source) - self.spatial
        names = ("n", "c")[2 - lead :]
        passing = tuple(table.add_unless_one(name, extent) for name, extent in zip(names, source[:lead], strict=True))
        mean = self.adaptive and math.prod(result[lead:]) == 1
        outside = _spatial(table, "", source[lead:], FactorKind.REDUCTION if mean else FactorKind.BLOCKED)
        inside = _spatial(table, "p", result[lead:])
        made = (*_all(passing), *_all(inside))
        extra = (Work(coefficient=self.saved_extra_bytes, factors=made),) if self.saved_extra_bytes else ()
        operand = (*passing, *outside)
        inner = _cut(table, self._halos(call, source[lead:], result[lead:]), operand, element)
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=(operand,),
            results=((*passing, *inside),) * len(call.results),
            op_class="elementwise",
            work=(Work(coefficient=1.0, factors=_all(operand)),),
            saves=() if mean else present(self.saves, 1),
            saved_results=self.saved_results,
            saved_extra=extra,
            mean_over=_all(outside) if mean else (),
            inner=inner,
            inner_scratch=_copied(inner, operand, element),
            joined=bool(inner),
        )

    def _halos(self, call: Call, source: Sequence[int], result: Sequence[int]) -> Halos:
        """The halo of each dim, where a call on pieces computes the same. A mean that takes fewer elements at the edge
        of the tensor would differ at the edge of a piece."""
        if not self.slides:
            return (None,) * self.spatial
        size = integers(call.argument(1, "kernel_size"))
        padding = integers(call.argument(3, "padding", 0))
        if self.slides == "mean":
            counts_padding = call.argument(5, "count_include_pad", True) is True
            if call.argument(4, "ceil_mode", False) is True or (any(padding) and not counts_padding):
                return (None,) * self.spatial
        dilation = call.argument(4, "dilation", 1) if self.slides == "max" else 1
        size = size if len(size) == self.spatial else size * self.spatial
        return halos(stencils(size, call.argument(2, "stride", ()), padding, dilation), source, result)


def _apart(over: Sequence[Stencil], extents: Sequence[int], results: Sequence[int]) -> Halos:
    """For each dim no edges where elements are spread over results of their own, `stride` each; else None: the dim
    cannot be cut."""
    return tuple(
        Halo(before=0, after=0)
        if one.padding == 0 and (one.size - 1) * one.dilation < one.stride and made == read * one.stride
        else None
        for one, read, made in zip(over, extents, results, strict=True)
    )


def _spatial(table: FactorTable, prefix: str, extents: Sequence[int], kind: FactorKind = FactorKind.BLOCKED) -> Dims:
    pairs = zip(_names(len(extents)), extents, strict=True)
    return tuple(table.add_unless_one(f"{prefix}{name}", extent, kind) for name, extent in pairs)


def _names(count: int) -> Sequence[str]:
    return SPATIAL[len(SPATIAL) - count :]


def _cut(table: FactorTable, found: Halos, operand: Dims, element: int) -> tuple[InnerCollective, ...]:
    """Split spatial dims with those of the results, where there is a halo; the messages for the edges of an operand."""
    messages = []
    for at, (name, halo) in enumerate(zip(_names(len(found)), found, strict=True)):
        if halo is None:
            continue
        factor = table.add_exchange(name, f"p{name}", FactorKind.HALO, reach=halo.reach)
        if factor is None:
            continue
        dim = len(operand) - len(found) + at
        others = tuple(one for other, indexed in enumerate(operand) if other != dim for one in indexed)
        messages += [
            InnerCollective(
                kind="send_recv",
                factor=factor,
                factors=others,
                element_bytes=float(element),
                rows=rows,
                forward=1,
                backward=1,
                gradient_of=0,
            )
            for rows in (halo.before, halo.after)
            if rows
        ]
    return tuple(messages)


def _copied(inner: Sequence[InnerCollective], operand: Dims, element: int) -> tuple[Work, ...]:
    """The copy of an operand to which edges are joined."""
    return (Work(coefficient=float(element), factors=_all(operand)),) if inner else ()


def _all(dims: Dims) -> Indices:
    return tuple(factor for indexed in dims for factor in indexed)
