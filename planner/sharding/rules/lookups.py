"""The rule of bags of rows: lookups that are added up."""

from dataclasses import dataclass
from typing import final

from planner.graph.call import Call
from planner.sharding.rule import Dims, FactorKind, Rule, Work
from planner.sharding.rules.spec import FactorTable, RuleSpec, dims_of

_MAX = 2  # torch's number for bags whose largest element counts; 0 are sums, 1 averages


@final
@dataclass(frozen=True, kw_only=True)
class EmbeddingBag(RuleSpec):
    """`v h, b k -> b h`: rows of a table, by the numbers in each of b bags, summed or averaged.

    Rows v are a reduction, as in a lookup: each device adds up those that it has. The largest element of a bag is no
    sum: there v is blocked. Bags of different lengths stand one after the other, `v h, k, b -> b h`, and neither they
    nor the numbers can be cut evenly.
    """

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        weight, numbers = call.operands[0].shape, call.operands[1].shape
        largest = dict(call.keywords).get("mode", 0) == _MAX
        v = _factor(table, "v", weight[0], FactorKind.BLOCKED if largest else FactorKind.REDUCTION)
        h = _factor(table, "h", weight[1], FactorKind.PARALLEL)
        uneven = len(call.arguments) > 2
        bags = _factor(table, "b", call.results[0].shape[0], FactorKind.BLOCKED if uneven else FactorKind.PARALLEL)
        k = _factor(table, "k", numbers[-1], FactorKind.BLOCKED)
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


def _factor(table: FactorTable, name: str, extent: int, kind: FactorKind) -> tuple[int, ...]:
    return (table.add(name, extent, kind),) if extent != 1 else ()
