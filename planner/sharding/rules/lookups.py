"""Rules of lookups: bags of rows that are added up, and rows of tables that are not on the devices."""

from dataclasses import dataclass
from typing import final

from planner.graph.call import Call
from planner.sharding.rule import Dims, FactorKind, Outside, Rule, Work
from planner.sharding.rules.spec import FactorTable, RuleSpec, dims_of

_FP32 = 4  # bytes of a number in a row of such a table, at least
_PLACE = 8  # bytes of the place of an id among the rows that came
_MAX = 2  # torch's number for bags whose largest element counts; 0 are sums, 1 averages


@final
@dataclass(frozen=True, kw_only=True)
class EmbeddingBag(RuleSpec):
    """`v h, b k -> b h`: rows of a table, by the numbers in each of b bags, summed or averaged.

    Rows v are a reduction, as in a lookup: each device adds up the rows that it has. The largest element of a bag is no
    sum: there v is blocked. Bags of different lengths follow each other, `v h, k, b -> b h`; neither the bags nor the
    numbers can then be cut evenly.
    """

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        weight, numbers = call.operands[0].shape, call.operands[1].shape
        largest = dict(call.keywords).get("mode", 0) == _MAX
        v = table.add_unless_one("v", weight[0], FactorKind.BLOCKED if largest else FactorKind.REDUCTION)
        h = table.add_unless_one("h", weight[1], FactorKind.PARALLEL)
        uneven = len(call.arguments) > 2
        bags = table.add_unless_one(
            "b", call.results[0].shape[0], FactorKind.BLOCKED if uneven else FactorKind.PARALLEL
        )
        k = table.add_unless_one("k", numbers[-1], FactorKind.BLOCKED)
        held: Dims = (k,) if uneven else (bags, k)
        offsets = dims_of(table, call.operands[2].shape, FactorKind.BLOCKED, "offset") if uneven else ()
        beside: tuple[Dims, ...] = (held, offsets) if uneven else (held,)
        weighted: tuple[Dims, ...] = (held,) if len(call.operands) > len(beside) + 1 else ()
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=((v, h), *beside, *weighted),
            results=((bags, h),),
            op_class="embedding",
            work=(Work(coefficient=1.0, factors=(*h, *(f for dim in held for f in dim))),),
            looked_up=(0,),
            saves=tuple((operand, (0, *range(2 + uneven, 3 + uneven))) for operand in range(1, 2 + uneven)),
        )


@final
@dataclass(frozen=True, kw_only=True)
class OutsideRows(RuleSpec):
    """`b s -> b s h`, or for bags `b k -> b h`: rows of a table that is not on the devices, at a `place`.

    Every device gets the rows of its own ids, whole: h is blocked, and so are the numbers in a bag. The ids' places
    among the rows that came, and those rows, are kept for the backward pass.
    """

    place: str

    def build(self, call: Call) -> Rule:
        table, words = FactorTable(call.op), dict(call.keywords)
        (ids,) = call.operands
        rows, width = words["rows"], words["width"]
        assert isinstance(rows, int), call
        assert isinstance(width, int), call
        bags = bool(words["bag"])
        counted = len(ids.shape) - bags
        held: Dims = tuple(
            table.add_unless_one(
                f"b{dim}" if dim else "b", extent, FactorKind.PARALLEL if dim < counted else FactorKind.BLOCKED
            )
            for dim, extent in enumerate(ids.shape)
        )
        h = table.add_unless_one("h", width, FactorKind.BLOCKED)
        looked_up = tuple(factor for dim in held for factor in dim)
        row_bytes = width * max(_FP32, call.results[0].element_bytes)
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=(held,),
            results=((*held[:counted], h),),
            op_class="embedding",
            work=(Work(coefficient=1.0, factors=(*looked_up, *h)),),
            saved_extra=(Work(coefficient=float(_PLACE + row_bytes), factors=looked_up),),
            outside=Outside(
                place=self.place, ids=looked_up, rows=rows, row_bytes=row_bytes, trained=bool(words["trainable"])
            ),
        )
