"""Rules that follow from the shapes alone: elementwise, normalisation, reductions, and what is made from nothing."""

from dataclasses import dataclass
from typing import final

from planner.graph.call import Call
from planner.graph.random_ops import RandomOps
from planner.sharding.rule import FactorKind, Rule, Work
from planner.sharding.rules.spec import (
    FactorTable,
    RuleSpec,
    Saves,
    broadcast_dims,
    dims_of,
    integers,
    leading_names,
    normal_dim,
    present,
)


@final
@dataclass(frozen=True, kw_only=True)
class Elementwise(RuleSpec):
    """Every dim of the result is a factor; operands are broadcast to the result. A call that drops elements keeps
    `dropped_bytes` for each. The formula of its gradient makes `scratch` tensors of the shape of the result, which live
    only while it runs; `gradient_scratch` has those for the gradient of one operand (operand, tensors, bytes of masks
    for each element). The gradient of the result itself serves the operands that are `handed` it; other operands get
    one of its shape."""

    op_class: str = "elementwise"
    work: float = 1.0
    saves: Saves = ()
    saved_results: tuple[int, ...] = ()
    chance: RandomOps | None = None
    dropped_bytes: float = 0.0
    scratch: float = 0.0
    gradient_scratch: tuple[tuple[int, float, float], ...] = ()
    handed: tuple[int, ...] = ()
    blocked_dims: tuple[int, str, int | None] | None = (
        None  # position, name and default of an argument that names blocked dims; without a default it means all dims
    )
    blocked_trailing: int = 0  # number of last dims that are blocked
    local_form: str | None = None
    broadcast: bool = False
    passes: bool = False

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        shape = call.results[0].shape
        rank = len(shape)
        blocked = set()
        if self.blocked_dims is not None:
            position, name, default = self.blocked_dims
            listed = integers(call.argument(position, name, () if default is None else default))
            blocked = {normal_dim(dim, rank) for dim in listed}
            if default is None and not listed:
                blocked = set(range(rank))
        blocked |= {dim for dim in range(rank - self.blocked_trailing, rank) if dim >= 0}
        result = tuple(
            (table.add(f"d{dim}", extent, FactorKind.BLOCKED if dim in blocked else FactorKind.PARALLEL),)
            if extent != 1
            else ()
            for dim, extent in enumerate(shape)
        )
        operands = tuple(broadcast_dims(result, shape, operand.shape, call.op) for operand in call.operands)
        everything = tuple(range(len(table.freeze())))
        drops = self.chance is not None and self.chance.of(call.arguments, dict(call.keywords)) > 0
        if self.broadcast:
            table.add("copies", 1, FactorKind.BROADCAST)
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=operands,
            results=(result,) * len(call.results),
            op_class=self.op_class,
            work=(Work(coefficient=self.work, factors=everything),) if self.work else (),
            saves=present(self.saves, len(operands)),
            saved_results=self.saved_results,
            saved_extra=(Work(coefficient=self.dropped_bytes, factors=everything),)
            if drops and self.dropped_bytes
            else (),
            scratch=(Work(coefficient=self.scratch * call.results[0].element_bytes, factors=everything),)
            if self.scratch
            else (),
            gradient_scratch=tuple(
                (at, Work(coefficient=tensors * call.results[0].element_bytes + masks, factors=everything))
                for at, tensors, masks in self.gradient_scratch
                if at < len(operands)
            ),
            pointwise=self.op_class in ("elementwise", "copy") and not blocked,
            handed=self.handed,
            local_form=self.local_form,
            passes=self.passes,
        )


@final
@dataclass(frozen=True, kw_only=True)
class Normalise(RuleSpec):
    """Norms over the trailing dims listed at position 1, which are blocked; weight and bias have just those dims.

    Autograd keeps `statistics` fp32 numbers (mean, reciprocal deviation) for every group that is normalised.
    """

    work: float
    saves: Saves
    statistics: int

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        shape = call.operands[0].shape
        lead = len(shape) - len(integers(call.argument(1, "normalized_shape")))
        own = ("h",) if len(shape) - lead == 1 else tuple(f"h{i}" for i in range(len(shape) - lead))
        kinds = [FactorKind.PARALLEL] * lead + [FactorKind.BLOCKED] * len(own)
        dims = tuple(
            (table.add(name, extent, kind),) if extent != 1 else ()
            for name, extent, kind in zip((*leading_names(lead), *own), shape, kinds, strict=True)
        )
        groups = tuple(factor for indexed in dims[:lead] for factor in indexed)
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=tuple(broadcast_dims(dims, shape, operand.shape, call.op) for operand in call.operands),
            results=(dims,),
            op_class="normalisation",
            work=(Work(coefficient=self.work, factors=tuple(range(len(table.freeze())))),),
            saves=present(self.saves, len(call.operands)),
            saved_extra=(Work(coefficient=4.0 * self.statistics, factors=groups),),
        )


@final
@dataclass(frozen=True, kw_only=True)
class Reduce(RuleSpec):
    """Sum or mean over some dims (all where none are given). Other reductions block the dims; autograd keeps their
    operand and their result."""

    combine: str  # "sum", "mean" or "blocked"

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        shape = call.operands[0].shape
        given = call.argument(1, "dim")
        listed = integers(given) if isinstance(given, int | tuple) and not isinstance(given, bool) else ()
        reduced = {normal_dim(dim, len(shape)) for dim in listed} or set(range(len(shape)))
        kind = FactorKind.BLOCKED if self.combine == "blocked" else FactorKind.REDUCTION
        source = tuple(
            (table.add(f"d{dim}", extent, kind if dim in reduced else FactorKind.PARALLEL),) if extent != 1 else ()
            for dim, extent in enumerate(shape)
        )
        kept = [source[dim] for dim in range(len(shape)) if dim not in reduced]
        if len(call.results[0].shape) == len(shape):  # keepdim
            kept = [() if dim in reduced else source[dim] for dim in range(len(shape))]
        everything = tuple(range(len(table.freeze())))
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=(source,),
            results=(tuple(kept),) * len(call.results),
            op_class="elementwise",
            work=(Work(coefficient=1.0, factors=everything),),
            saves=((0, (0,)),) if self.combine == "blocked" else (),
            saved_results=(0,) if self.combine == "blocked" else (),
            spread=self.combine == "sum",
            mean_over=tuple(f for dim in reduced for f in source[dim]) if self.combine == "mean" else (),
        )


@final
@dataclass(frozen=True, kw_only=True)
class Factory(RuleSpec):
    """Results made from nothing (arange, a scalar), the same on every device."""

    local_form: str | None = None

    op_class: str = "copy"

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        operands = tuple(dims_of(table, t.shape, FactorKind.BLOCKED, f"in{i}_") for i, t in enumerate(call.operands))
        results = tuple(dims_of(table, t.shape, FactorKind.BLOCKED, f"out{i}_") for i, t in enumerate(call.results))
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=operands,
            results=results,
            op_class=self.op_class,
            local_form=self.local_form,
        )


@final
@dataclass(frozen=True, kw_only=True)
class Filled(RuleSpec):
    """The same number everywhere in a shape that is spelled out: each device makes its piece.

    A tensor argument is read for its type alone (new_zeros): it may lie as it likes.
    """

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        result = dims_of(table, call.results[0].shape)
        operands = tuple(dims_of(table, t.shape, FactorKind.COMBINED, f"in{i}_") for i, t in enumerate(call.operands))
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=operands,
            results=(result,),
            op_class="copy",
            local_form="filled",
        )
