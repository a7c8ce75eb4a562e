"""Rules of norms over channels, whose second dim is the channels: batch norm and group norm."""

from dataclasses import dataclass
from typing import final

from planner.graph.call import Call
from planner.sharding.rule import Dims, Factor, FactorKind, InnerCollective, Rule, Work
from planner.sharding.rules.spec import FactorTable, RuleSpec

_FP32 = 4  # bytes


@final
@dataclass(frozen=True, kw_only=True)
class BatchNorm(RuleSpec):
    """`n c h w, c, c, c, c -> n c h w, c, ...`: input; then weight, bias, running mean and variance where given.

    `training` is the position of the argument that says so, or None where the operator uses the running statistics. In
    training the statistics of a channel are taken over n h w. Devices that have parts of these loops combine their
    sums, so that every plan computes what one device does (synchronised batch norm): two sums forward (the mean, then
    the squares of the distances to it), and one of two numbers backward. Two wide copies of the input live meanwhile.
    Autograd keeps both statistics, in fp32.
    """

    training: int | None

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        shape = call.operands[0].shape
        training = self.training is not None and call.argument(self.training, "training") is True
        # Statistics have no dim of samples; where they are not of this batch there is nothing to combine.
        kind = FactorKind.COMBINED if training or len(call.results) > 1 else FactorKind.PARALLEL
        names = ("n", "c", *("d", "h", "w")[5 - len(shape) :])
        kinds = [FactorKind.PARALLEL if name == "c" else kind for name in names]
        dims: Dims = tuple(
            (table.add(name, extent, each),) if extent != 1 else ()
            for name, extent, each in zip(names, shape, kinds, strict=True)
        )
        channels: Dims = (dims[1],)
        factors = table.freeze()
        every, wide = tuple(range(len(factors))), max(_FP32, call.operands[0].element_bytes)
        return Rule(
            op=call.op,
            factors=factors,
            operands=(dims, *(channels for _ in call.operands[1:])),
            results=(dims, *(channels for _ in call.results[1:])),
            op_class="normalisation",
            work=(Work(coefficient=8.0, factors=every),),
            saves=_saves(len(call.operands), training),
            saved_extra=(Work(coefficient=2.0 * _FP32, factors=dims[1]),) if training else (),
            inner=_sums(factors, dims[1], wide) if training else (),
            inner_scratch=(Work(coefficient=2.0 * wide, factors=every),) if training else (),
        )


def _saves(operands: int, training: bool) -> tuple[tuple[int, tuple[int, ...]], ...]:
    if operands < 2:
        return ((0, (0,)),) if training else ()
    return ((0, (0, 1) if training else (1,)), (1, (0,)))


def _sums(factors: tuple[Factor, ...], channels: tuple[int, ...], element: int) -> tuple[InnerCollective, ...]:
    def over(factor: int, numbers: int, forward: int, backward: int) -> InnerCollective:
        return InnerCollective(
            kind="all_reduce",
            factor=factor,
            factors=channels,
            element_bytes=numbers * element,
            forward=forward,
            backward=backward,
        )

    combined = [index for index, factor in enumerate(factors) if factor.kind is FactorKind.COMBINED]
    return tuple(sums for index in combined for sums in (over(index, 1, 2, 0), over(index, 2, 0, 1)))


@final
@dataclass(frozen=True, kw_only=True)
class GroupNorm(RuleSpec):
    """`n (g c) h w, (g c), (g c) -> n (g c) h w`: groups are parallel; the local call has the local number of them."""

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        shape = call.operands[0].shape
        groups = call.integer(1, "num_groups", 1)
        n = (table.add("n", shape[0]),) if shape[0] != 1 else ()
        g = (table.add("g", groups),) if groups != 1 else ()
        own = shape[1] // groups
        c = (table.add("c", own, FactorKind.BLOCKED),) if own != 1 else ()
        names = ("d", "h", "w")[5 - len(shape) :]
        spatial = tuple(
            (table.add(name, extent, FactorKind.BLOCKED),) if extent != 1 else ()
            for name, extent in zip(names, shape[2:], strict=True)
        )
        dims: Dims = (n, (*g, *c), *spatial)
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=(dims, *(((*g, *c),) for _ in call.operands[1:])),
            results=(dims,),
            op_class="normalisation",
            work=(Work(coefficient=8.0, factors=tuple(range(len(table.freeze())))),),
            saves=_saves(len(call.operands), training=True),
            saved_extra=(Work(coefficient=2.0 * _FP32, factors=(*n, *g)),),
        )
