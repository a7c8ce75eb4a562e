"""Rules of convolutions and pooling: what slides a window over the spatial dims.

Spatial dims are not split: a device would need the edge of its neighbour's piece, and no halo exchange is there yet.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from planner.errors import RuleError
from planner.graph.call import Call
from planner.sharding.rule import Dims, FactorKind, Rule, Work
from planner.sharding.rules.spec import FactorTable, RuleSpec, Saves, present

_SPATIAL = ("d", "h", "w")
Indices = tuple[int, ...]


@final
@dataclass(frozen=True, kw_only=True)
class Convolution(RuleSpec):
    """`n (g i) h w, (g o) i kh kw, (g o) -> n (g o) ph pw`, with any number of spatial dims.

    Groups g are parallel, and the local call has the local number of them; input channels i are a reduction. The
    kernel and both spatial extents are blocked. As an implicit GEMM it has the rows n ph pw, the columns o and the
    depth i kh kw, so its work is 2 n (g o) ph pw i kh kw.
    """

    spatial: int

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        source, weight, result = call.operands[0], call.operands[1], call.results[0]
        groups = call.integer(6, "groups", 1)
        if len(source.shape) not in (self.spatial + 1, self.spatial + 2):
            raise RuleError(f"{call.op}: an input of shape {source.shape} does not have {self.spatial} spatial dims")
        batch = () if len(source.shape) == self.spatial + 1 else (table.add_unless_one("n", source.shape[0]),)
        g = table.add_unless_one("g", groups)
        o, i = (
            table.add_unless_one("o", weight.shape[0] // groups),
            table.add_unless_one("i", weight.shape[1], FactorKind.REDUCTION),
        )
        outside, kernel, inside = (
            _blocked(table, prefix, shape[-self.spatial :])
            for prefix, shape in (("", source.shape), ("k", weight.shape), ("p", result.shape))
        )
        operands: tuple[Dims, ...] = ((*batch, (*g, *i), *outside), ((*g, *o), i, *kernel), ((*g, *o),))
        rows, depth = (*_all(batch), *_all(inside)), (*i, *_all(kernel))
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=operands[: len(call.operands)],
            results=((*batch, (*g, *o), *inside),),
            op_class="matmul",
            work=(Work(coefficient=2.0, factors=(*rows, *g, *o, *depth)),),
            addends=(2,) if len(call.operands) > 2 else (),
            saves=((0, (0, 1)), (1, (0, 1))),  # all of it whatever is asked for
            roles=(("rows", rows), ("columns", o), ("depth", depth), ("batch", g)),
        )


@final
@dataclass(frozen=True, kw_only=True)
class Pool(RuleSpec):
    """Pooling over trailing spatial dims, which are blocked; samples and channels pass through.

    `saves` is empty for one result per channel where `whole_saves_nothing`: that is a mean. The work is counted by the
    elements that are read, overlaps once. `saved_extra_bytes` are those that autograd keeps per element of the result.
    """

    spatial: int = 2
    saves: Saves = ((0, (0,)),)
    saved_results: tuple[int, ...] = ()
    saved_extra_bytes: float = 0.0
    whole_saves_nothing: bool = False

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        source, result = call.operands[0].shape, call.results[0].shape
        lead = len(source) - self.spatial
        names = ("n", "c")[2 - lead :]
        passing = tuple(table.add_unless_one(name, extent) for name, extent in zip(names, source[:lead], strict=True))
        outside = _blocked(table, "", source[lead:])
        inside = _blocked(table, "p", result[lead:])
        made = (*_all(passing), *_all(inside))
        mean = self.whole_saves_nothing and math.prod(result[lead:]) == 1
        extra = (Work(coefficient=self.saved_extra_bytes, factors=made),) if self.saved_extra_bytes else ()
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=((*passing, *outside),),
            results=((*passing, *inside),) * len(call.results),
            op_class="elementwise",
            work=(Work(coefficient=1.0, factors=(*_all(passing), *_all(outside))),),
            saves=() if mean else present(self.saves, 1),
            saved_results=self.saved_results,
            saved_extra=extra,
        )


def _blocked(table: FactorTable, prefix: str, extents: Sequence[int]) -> Dims:
    names = _SPATIAL[len(_SPATIAL) - len(extents) :]
    pairs = zip(names, extents, strict=True)
    return tuple(table.add_unless_one(f"{prefix}{name}", extent, FactorKind.BLOCKED) for name, extent in pairs)


def _all(dims: Dims) -> Indices:
    return tuple(factor for indexed in dims for factor in indexed)
