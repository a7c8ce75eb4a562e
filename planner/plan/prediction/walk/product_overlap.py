"""Tensor-parallel collectives that overlap with their matrix products (`planner.plan.layout.overlapped_products`).

They are charged in full, as if they were exposed. What chunks save, or cost, is subtracted from the exposed seconds of
the pass: the time of `costmodels.kernels.overlapped_products`. There every product of a chunk is priced with its number
of rows and its launch, and every collective with its latency. Chunks are not contiguous in the whole tensor, so some
tensors are copied once more: the results of products of an arriving operand, or the operand of a product whose result
leaves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from costmodels import arriving_time, leaving_time, operator_time
from hardware_profiles import Bytes, Seconds
from planner.plan.binding.bind import BoundOperator
from planner.plan.layout.overlapped_products import Overlap, is_shared
from planner.plan.prediction.charges import Phase, charge
from planner.plan.prediction.step import ChunkCost, PassCost
from planner.plan.prediction.walk.stage_cost import COMMUNICATION, StageCost
from planner.pricing.operator_price import Array, OperatorPrices, transient_bytes
from planner.sharding.layout import Layout, local_fraction
from planner.sharding.redistribute import Step
from planner.sharding.rule import Rule

if TYPE_CHECKING:
    from planner.plan.prediction.walk.walk import Walk

_ROWS = 0
"""The place of the rows among the operands of a linear layer; weight and bias follow."""

Way = Literal["forward", "backward"]
WAYS: Mapping[Way, int] = {"forward": 0, "backward": 1}
"""The index of each direction in the pairs of an overlap."""


Saves: TypeAlias = Callable[[Overlap, Way, Step], Seconds]
"""The seconds that an overlap saves in one direction."""


class _Products(NamedTuple):
    """Seconds of the products under a collective: without chunks, of one chunk, and of the work that can follow the
    last chunk; and seconds of the copy that chunks need."""

    whole: Seconds
    chunk: Seconds
    under: Seconds
    copied: Seconds


@dataclass(kw_only=True)
class ProductOverlap:
    """Charges overlaps on a walk. Caches the rules of products with fewer rows, and savings."""

    walk: "Walk"
    _rules: dict[tuple[int, int, int], tuple[Rule, Rule]] = field(default_factory=dict)
    _saved: dict[tuple[object, ...], tuple[Seconds, tuple[object, ...]]] = field(default_factory=dict)

    def charge(self, cost: StageCost, chunk: ChunkCost, one: Overlap, *, again: bool) -> None:
        """Charge an overlap to its operator. In a recomputed block (`again`) the operand is gathered again under the
        products whose results are not kept; if there are none, under the gradients of the rows."""
        self._way(cost, chunk, one, "forward", self._saves, "forward")
        left = tuple(at for at in one.products if not self.walk.bound.is_kept(at))
        if again and (left or is_shared(one, self.walk.bound.graph)):
            self._way(cost, chunk, replace(one, products=left), "forward", self._saves, "recomputation")
        elif again and self._trains(one):
            whole = replace(one, chunks=(1, one.chunks[1]))
            self._way(cost, chunk, whole, "forward", self._saves_later, "backward")
        self._way(cost, chunk, one, "backward", self._saves, "backward")

    def saves(self, one: Overlap) -> tuple[Seconds, Seconds]:
        """Seconds that an overlap saves forward and backward in each pass; negative if it costs time."""
        ways: tuple[Way, Way] = ("forward", "backward")
        there, back = (
            0.0 if step is None else self._saves(one, way, step) for way, step in zip(ways, one.steps, strict=True)
        )
        return there, back

    def transient(self, one: Overlap) -> Bytes:
        """Transient bytes of products that run with another operator, and of chunks in progress in addition to the
        whole tensor; the whole operand if it is gathered again for weight gradients alone."""
        walk, ways = self.walk, tuple(WAYS)
        others = sum(float(walk.price(walk.bound.operators[at], counted=False).transient[0]) for at in one.early)
        again = one.kind == "operand" and all(walk.bound.is_kept(at) for at in one.products)
        later = 2 * max(self._moved(one, "forward")) if again else 0.0
        return others + later + max(self._on_its_way(one, way) for way in ways)

    def _on_its_way(self, one: Overlap, way: Way) -> Bytes:
        """Bytes of the chunks in one direction."""
        step, chunks = one.steps[WAYS[way]], one.chunks[WAYS[way]]
        if step is None:
            return 0.0
        prices = [self.walk.price(self.walk.bound.operators[at], counted=False) for at in one.products]
        beside = max(float(self._other_side(one, price)[0]) for price in prices)
        moved = self._moved(one, way)
        return chunk_bytes(max(moved) if step.kind == "all_reduce" else sum(moved), beside, chunks)

    def _moved(self, one: Overlap, way: Way) -> tuple[Bytes, Bytes]:
        """Bytes of a value that moves, on a device before and after."""
        nbytes, sizes = self.walk.bound.graph.types[one.value].nbytes, self.walk.bound.plan.mesh.sizes
        source, target = (nbytes * local_fraction(layout, sizes) for layout in self._ends(one, way))
        return source, target

    def moment(self, one: Overlap) -> Bytes:
        """Bytes that live while its operator runs, without weights."""
        bound, op = self.walk.bound, self.walk.bound.operators[one.at]
        prices = self.walk.price(op, counted=False)
        return self.transient(one) + float(transient_bytes(self.walk.alive, bound.graph, one.at, op.rule, prices)[0])

    def _trains(self, one: Overlap) -> bool:
        """Whether a weight or bias of its products has a gradient, which needs the operand."""
        graph = self.walk.bound.graph
        return any(name in graph.differentiable for at in one.products for name in graph.operators[at].operands[1:])

    def _way(self, cost: StageCost, chunk: ChunkCost, one: Overlap, way: Way, saves: Saves, phase: Phase) -> None:
        """Charge one direction of a value in a phase: its full seconds, and its savings; in one piece if it has no
        products."""
        step = one.steps[WAYS[way]]
        if step is None:
            return
        walk = self.walk
        route, hidden = walk.book.route("activations", walk.bound.graph.types[one.value], *self._ends(one, way))
        owner = walk.bound.operators[one.at].operator.name
        saved = saves(one, way, step) if one.products and not hidden else 0.0
        chunks = one.chunks[WAYS[way]] if one.products else 1
        into: PassCost = chunk.forward if phase == "forward" else chunk.backward
        part = "recomputation" if phase == "recomputation" else COMMUNICATION
        cost.micro_batch[part] += route.seconds
        sent = route.seconds * walk.cluster.device.overlapped
        into.add(waits=route.seconds - saved, hidden=hidden, sent=sent, under_products=saved)
        for message in route.messages:
            piece = replace(message, nbytes=message.nbytes / chunks)
            charge(cost.messages, part, owner, piece, {phase: chunks})

    def _saves_later(self, one: Overlap, way: Way, step: Step) -> Seconds:
        """Seconds saved for an operand that is gathered in the backward pass while the gradients of its rows are
        computed."""
        bound = self.walk.bound
        nbytes = step.fraction * bound.graph.types[one.value].nbytes
        sent = self.walk.pricers.activations.message_seconds(step.kind, step.axis, nbytes)
        return min(
            sent * self.walk.cluster.device.overlapped, sum(self._of_rows(bound.operators[at]) for at in one.products)
        )

    def _of_rows(self, op: BoundOperator) -> Seconds:
        """Seconds of the gradient of the rows of a product."""
        weights = tuple(range(1, len(op.operator.operands)))
        return float(self.walk.price(op, weights, counted=False).backward[0])

    def _ends(self, one: Overlap, way: Way) -> tuple[Layout, Layout]:
        made = self.walk.made(one.value)
        wanted = self.walk.bound.operators[one.reader].layouts.operands[one.place]
        return (made.forward, wanted.forward) if way == "forward" else (wanted.gradient, made.gradient)

    def _saves(self, one: Overlap, way: Way, step: Step) -> Seconds:
        """Seconds that a collective and the products under it save, compared with one after the other."""
        arrives = (one.kind == "operand") == (way == "forward")
        beside = one.chunked if way == "forward" else one.products
        operators = [self.walk.bound.operators[at] for at in beside]
        tensor = self.walk.bound.graph.types[one.value]
        kinds = tuple((id(op.rule), op.strategy) for op in operators)
        chunks, dim = one.chunks[WAYS[way]], one.dims[WAYS[way]]
        key = (kinds, id(tensor), way, step, dim, chunks, one.kind)
        if key not in self._saved:
            pricer, nbytes = self.walk.pricers.activations, step.fraction * tensor.nbytes
            overlapped = self.walk.cluster.device.overlapped
            sent, piece = (
                overlapped * pricer.message_seconds(step.kind, step.axis, nbytes / count) for count in (1, chunks)
            )
            found = (self._forward if way == "forward" else self._backward)(one, operators, dim, chunks)
            taken = (arriving_time if arrives else leaving_time)(found.chunk, piece, chunks, found.under)
            copied = found.copied if chunks > 1 else 0.0
            self._saved[key] = (float(found.whole + sent - taken - copied), (operators, tensor))
        return self._saved[key][0]

    def _forward(self, one: Overlap, operators: list[BoundOperator], dim: int, chunks: int) -> _Products:
        prices = [self.walk.price(op, counted=False) for op in operators]
        pieces = [self.walk.price(self._part(op, dim, chunks), counted=False) for op in operators]
        return _Products(
            whole=sum(float(price.forward[0]) for price in prices),
            chunk=sum(float(piece.forward[0]) for piece in pieces),
            under=0.0,
            copied=self._copied(one, operators),
        )

    def _backward(self, one: Overlap, operators: list[BoundOperator], dim: int, chunks: int) -> _Products:
        """Gradients of the rows overlap with the collective; those of weights follow."""
        whole = sum(float(self.walk.price(op, counted=False).backward[0]) for op in operators)
        chunk = sum(self._of_rows(self._part(op, dim, chunks)) for op in operators)
        under = sum(float(self.walk.price(op, (_ROWS,), counted=False).backward[0]) for op in operators)
        return _Products(whole=whole, chunk=chunk, under=under, copied=self._copied(one, operators))

    def _part(self, op: BoundOperator, dim: int, chunks: int) -> BoundOperator:
        """A product with the rows of one chunk."""
        if chunks == 1:
            return op
        key = (id(op.rule), dim, chunks)
        if key not in self._rules:
            cut = op.rule.operands[_ROWS][dim][0]  # the outer one of several factors, which is cut first
            factors = tuple(
                replace(factor, extent=factor.extent // chunks) if at == cut else factor
                for at, factor in enumerate(op.rule.factors)
            )
            self._rules[key] = (replace(op.rule, factors=factors), op.rule)
        return replace(op, rule=self._rules[key][0])

    @staticmethod
    def _other_side(one: Overlap, price: OperatorPrices) -> Array:
        """Bytes of the result of a product whose operand moves, or of the operand of a product whose result moves."""
        return price.results[0] if one.kind == "operand" else price.operands[_ROWS]

    def _copied(self, one: Overlap, operators: list[BoundOperator]) -> Seconds:
        """Seconds to copy the results of products, or the operand of one."""
        prices = [self.walk.price(op, counted=False) for op in operators]
        nbytes = sum(float(self._other_side(one, price)[0]) for price in prices)
        device = self.walk.cluster.device
        return operator_time(op_class="copy", flops=0.0, bytes_moved=2 * nbytes, dtype="fp32", device=device)


def chunk_bytes(moved: Bytes, beside: Bytes, chunks: int) -> Bytes:
    """Bytes that a collective in this many chunks holds. `moved` are the bytes sent and received in all: one chunk is
    in progress while another one is used or made. A chunk of the product's other side, `beside`, is copied."""
    return min(2, chunks) / chunks * moved + beside / chunks
