"""The tensors of one stage as a rank has them: where they come from, how they are redistributed, how large they are."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hardware_profiles import Bytes
from planner.graph.operator_graph import Operator
from planner.plan.binding.bind import BoundOperator, BoundPlan
from planner.plan.layout.segments import Segment, segments_of
from planner.plan.layout.stage_cut import StageCut
from planner.plan.layout.strides import Shape, Strides, elementwise, folded, reshaped, spread
from planner.plan.layout.strides import viewed as view_of
from planner.pricing.inner_messages import inner_messages, joined_bytes
from planner.sharding.layout import Layout, local_shape
from planner.sharding.redistribute import COLLECTIVES, Step, is_view, redistribution
from planner.sharding.rule import Duplex, Work, local_extents, loop_extents

Lying = tuple[Shape, Strides]
"""The local shape of a tensor and its strides."""

_MATRIX = 2  # dims


@dataclass(frozen=True, slots=True)
class Move:
    """The redistribution between a producer and a consumer: steps there, and steps of the gradient back. `copies` says
    that a last slice is copied, because a view would keep the whole tensor."""

    there: tuple[Step, ...]
    back: tuple[Step, ...]
    copies: bool

    @property
    def gathers(self) -> bool:
        """Whether the consumer gets memory that the producer does not hold already."""
        return any(step.kind in COLLECTIVES for step in self.there)

    @property
    def departs(self) -> bool:
        """Whether anything is sent, there or back, asynchronously (`runtime.comm.redistribute.Transfer`)."""
        steps = (*self.there, *self.back)
        return any(step.kind in COLLECTIVES for step in steps) and not any(step.zigzag for step in steps)

    def yields(self, steps: Sequence[Step], *, weight: bool) -> bool:
        """Whether interleaved micro-batches yield at these steps (those there, or those back): where they send
        something; at a weight, where both directions do."""
        return self.departs and (weight or any(step.kind in COLLECTIVES for step in steps))


def move_of(bound: BoundPlan, at: int, place: int) -> Move:
    """How an operand comes to its operator, if it is sent by itself."""
    op, graph, mesh = bound.operators[at], bound.graph, bound.plan.mesh
    name, wanted = op.operator.operands[place], op.layouts.operands[place]
    made, shape = bound.promised[name], graph.types[name].shape
    marked, ways = bound.sequences.get(name, frozenset()), (wanted.gradient, made.gradient)
    there = redistribution(shape, mesh, made.forward, wanted.forward, marked)
    back = redistribution(shape, mesh, *ways, marked) if graph.graded(op.operator)[place] else ()
    copies = bool(there) and is_view(there[-1]) and name not in bound.parameters
    return Move(there, back, copies)


def viewed(op: Operator, place: int) -> int:
    """The operand whose memory a result of an operator that copies nothing has: an operand for each result, as of
    `broadcast_tensors`, or the first."""
    return place if len(op.operands) == len(op.results) else 0


@dataclass(frozen=True, kw_only=True)
class StageTensors:
    """The tensors of a stage. Operators are named by their index in the graph, operands by their place in the call."""

    bound: BoundPlan
    cut: StageCut
    _moves: dict[tuple[int, int], Move] = field(default_factory=dict)

    @cached_property
    def promised(self) -> Mapping[str, Duplex]:
        return self.bound.promised

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        return segments_of(self.bound, self.cut)

    @cached_property
    def together(self) -> frozenset[str]:
        """All weights that are gathered with others."""
        return frozenset[str]().union(*(segment.gathered for segment in self.segments))

    def visit(self, number: int) -> Mapping[str, Bytes]:
        """Bytes of the offloaded weights that are brought for a segment."""
        names = self.segments[number].weights
        return {name: self.bytes(name, self.shape(name, self.bound.parameters[name].weight)) for name in names}

    def ahead(self, number: int, neighbour: int) -> Mapping[str, Bytes]:
        """The weights that are prefetched for the next segment while this one runs: none where this one has none
        itself."""
        if not 0 <= neighbour < len(self.segments) or not self.segments[number].weights:
            return {}
        return self.visit(neighbour)

    def move(self, at: int, place: int) -> Move:
        """How an operand comes to its operator, if it does not come with others."""
        if self.bound.operators[at].operator.operands[place] in self.together:
            return Move((), (), copies=False)
        if (at, place) not in self._moves:
            self._moves[at, place] = move_of(self.bound, at, place)
        return self._moves[at, place]

    def results(self, at: int) -> tuple[str, ...]:
        return tuple(name for name in self.bound.operators[at].operator.results if name is not None)

    def graded(self, op: BoundOperator) -> tuple[int, ...]:
        return self.bound.graph.graded_places(op.operator)

    def saved(self, op: BoundOperator) -> tuple[int, ...]:
        graded = set(self.graded(op))
        kept = tuple(place for place, needed_by in op.rule.saves if graded.intersection(needed_by))
        return kept[:1] if self.remembers(op) else kept

    def remembers(self, op: BoundOperator) -> bool:
        """Whether an operator stores its keys and values for later slices of the sequence."""
        return self.bound.plan.slices > 1 and op.rule.op_class == "attention"

    def keys(self, op: BoundOperator) -> Bytes:
        """Bytes of the keys and values of attention, of one slice."""
        pairs = list(zip(op.operator.operands, op.layouts.operands, strict=True))[1:3]
        return sum(self.bytes(name, self.shape(name, layout.forward)) for name, layout in pairs)

    def result_bytes(self, at: int) -> Bytes:
        """Bytes of the first result of an operator."""
        name, layout = self.results(at)[0], self.bound.operators[at].layouts.results[0].forward
        return self.bytes(name, self.shape(name, layout))

    def keeps(self, at: int) -> bool:
        op = self.bound.operators[at]
        extra = op.rule.saved_extra or op.rule.joined
        return bool(self.saved(op) or (self.graded(op) and (op.rule.saved_results or extra)))

    def gathered(self, at: int, place: int) -> bool:
        """Whether an operand is a weight that is gathered for its use, by itself."""
        name = self.bound.operators[at].operator.operands[place]
        return name in self.bound.parameters and name not in self.together and self.move(at, place).gathers

    def view(self, op: BoundOperator, place: int, shape: Shape, operands: Sequence[Lying]) -> Strides | None:
        """Strides of a result that is a view of an operand; None where it has memory of its own."""
        if op.rule.op_class not in ("view", "copy") or not operands:
            return None
        source = viewed(op.operator, place)
        if op.rule.local_form == "reshape":
            return reshaped(*operands[source], shape)
        if op.rule.op_class == "view":
            return view_of(op.rule, source, place, operands[source][1])
        names = (*op.operator.operands, *op.operator.results)
        alike = len({self.bound.graph.types[name].dtype for name in names if name is not None}) == 1
        return operands[source][1] if op.rule.passes and alike else None

    def strides(self, op: BoundOperator, shape: Shape, operands: Sequence[Lying]) -> Strides | None:
        """Strides of a result that has memory of its own; None where dims lie in order. Fused attention writes the
        heads of a token side by side, so that what is transposed back lies in order."""
        if op.rule.op_class == "attention" and len(shape) == len("bhsd"):
            _, heads, tokens, width = shape
            return heads * tokens * width, width, heads * width, 1
        return elementwise(shape, operands) if op.rule.pointwise else None

    def copied(self, op: BoundOperator, operands: Sequence[Lying]) -> list[tuple[int, tuple[int, ...]]]:
        """Places and shapes of the operands of a product that are copied. `torch.matmul` folds their leading dims into
        one; those of the factor of a frozen matrix only where that takes no copy."""
        if not op.rule.folds:
            return []
        (first, strides), (second, _) = operands[:2]
        if len(second) <= _MATRIX < len(first) and op.operator.operands[1] in self.bound.graph.differentiable:
            return [] if folded(first, strides, kept=1) else [(0, tuple(first))]
        if max(len(first), len(second)) <= _MATRIX or min(len(first), len(second)) < _MATRIX:
            return []
        (result,) = (name for name in op.operator.results if name is not None)
        lead = self.shape(result, op.layouts.results[0].forward)[:-_MATRIX]
        found = []
        for place, (shape, strides) in enumerate(operands[:2]):
            wanted = (*lead, *shape[-_MATRIX:])
            if not folded(wanted, spread(wanted, shape, strides), kept=_MATRIX):
                found.append((place, wanted))
        return found

    def scratch(self, op: BoundOperator) -> Bytes:
        """Bytes that live only while an operator runs, beside the gradients that it makes."""
        return self._counted(op, op.rule.scratch)

    def gradient_scratch(self, op: BoundOperator, place: int) -> Bytes:
        """Bytes that live only while the gradient of an operand is made."""
        return self._counted(op, op.rule.scratch_of_gradient(place))

    def saved_extra(self, op: BoundOperator) -> Bytes:
        """Bytes that autograd keeps beside operands and results, of an operator that has gradients."""
        return self._counted(op, op.rule.saved_extra) + self.joined(op)

    def _counted(self, op: BoundOperator, works: Iterable[Work]) -> Bytes:
        """Bytes of the terms of a rule on one device."""
        extents = loop_extents(op.rule, op.strategy, self.bound.plan.mesh)
        return float(sum(work.coefficient * math.prod(extents[f] for f in work.factors) for work in works))

    def joined(self, op: BoundOperator) -> Bytes:
        """Bytes that are received to be joined to the first operand of an operator, and kept."""
        return joined_bytes(op.rule, op.strategy, self.bound.plan.mesh)

    def inner_scratch(self, op: BoundOperator, *, backward: bool = False) -> Bytes:
        """Bytes that an operator takes for itself while it runs and sends; its results, or gradients, are made from
        them in the end. Where something is joined to a copy of an operand, the copy and what is received live beside
        them, and so does the gradient of the copy."""
        mesh = self.bound.plan.mesh
        if not op.rule.inner_scratch or not inner_messages(op.rule, op.strategy, mesh):
            return 0.0
        extents = local_extents(op.rule, op.strategy, mesh)
        own = sum(work.coefficient * math.prod(extents[f] for f in work.factors) for work in op.rule.inner_scratch)
        if not op.rule.joined:
            return float(own)
        return own + 2 * self.joined(op) + self._made(op, backward=backward)

    def _made(self, op: BoundOperator, *, backward: bool) -> Bytes:
        """Bytes of the results of an operator, or of the gradients of its operands."""
        results = [name for name in op.operator.results if name is not None]
        made = list(zip(results, op.layouts.results, strict=True))
        if backward:
            made = [(op.operator.operands[place], op.layouts.operands[place]) for place in self.graded(op)]
        return sum(self.bytes(name, self.shape(name, duplex.forward)) for name, duplex in made)

    def made_shape(self, name: str) -> tuple[int, ...]:
        return self.shape(name, self.promised[name].forward)

    def shape(self, name: str, layout: Layout) -> tuple[int, ...]:
        return local_shape(self.bound.graph.types[name].shape, layout, self.bound.plan.mesh.sizes)

    def bytes(self, name: str, shape: Sequence[int]) -> Bytes:
        return float(math.prod(shape) * self.bound.graph.types[name].element_bytes)
