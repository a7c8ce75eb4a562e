"""Overlapped tensor parallelism: which collectives of a plan are split into chunks that run under matrix products.

    operand     x ─all-gather─> [identity ─>] products      chunk k of x is multiplied while chunk k + 1 arrives; back,
                                                            the gradient of chunk k leaves while that of k + 1 is made
    result      x ─> product ─reduce-scatter─> reader       the other way round; an all-reduce likewise

A product is a linear layer by a parameter. An *overlap* joins a collective and its products: the collective that brings
the operand of one product, or of several that read the same value through its identity, or the collective that takes
the result of a product to its only reader. It must be exactly one step along one axis, there and back. The rows of a
tensor, all of its dims but the last, are cut into chunks along one of these dims, which the number of chunks divides.
Several products of one operand run as soon as it arrives: they are moved forward in the order of the graph.

A plan names its overlaps by the operator in the first block of its kind, with their chunks there and back, and the
number of products that run in chunks (`Training.tensor_overlap`): the results of a product in chunks are copied once
more, so products that are not needed to cover the collective run when all of the operand is there. With one chunk only
the gradient of an operand is overlapped, with the products of weight gradients; everything else is exposed. Everything
else follows, so that prices, audits and the runtime agree. A recomputed block that keeps the results of the products of
an operand receives the operand again without these products. These have no overlap: a product whose result a recomputed
block keeps and sends, a value that goes into another block or stage, and a tensor that is cut along the dim that is
summed.

Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models".
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, TypeAlias

from planner.errors import PlanFileError
from planner.graph.blocks import IDENTITY
from planner.graph.operator_graph import Operator, OperatorGraph
from planner.plan.binding.bind import BoundPlan, stage_ends, stage_of_operators
from planner.pricing.liveness import Replay, replays
from planner.sharding.layout import Layout, local_shape
from planner.sharding.redistribute import Step, redistribution
from planner.sharding.rule import Duplex

LINEAR = "aten.linear.default"
"""The operators that are split into chunks: of rows, a weight, and perhaps a bias."""

Kind: TypeAlias = Literal["operand", "result"]

THERE: Mapping[Kind, frozenset[str]] = {
    "operand": frozenset({"all_gather"}),
    "result": frozenset({"reduce_scatter", "all_reduce"}),
}
BACK: Mapping[Kind, frozenset[str]] = {"operand": THERE["result"], "result": THERE["operand"]}
"""Collectives that are split into chunks, of a value and of its gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """A collective and the products that it runs under.

    Attributes:
        kind: whether the collective brings the operand of the products, or takes the result of one.
        at: index of the operator where all of it happens: an identity or a product.
        reader, place: the operand that is moved.
        value: its name.
        products: operators.
        forward, backward: the steps of the value, and of its gradient; None where nothing is sent.
        chunks: the number of chunks, there and back.
        first: for an operand, the first `first` products run chunk by chunk while it arrives, the others when all of it
            is there; 0 for all.
        dims: the dims of the rows along which they are cut, there and back.
    """

    kind: Kind
    at: int
    reader: int
    place: int
    value: str
    products: tuple[int, ...]
    forward: Step | None
    backward: Step | None
    chunks: tuple[int, int] = (1, 1)
    first: int = 0
    dims: tuple[int, int] = (0, 0)

    @property
    def steps(self) -> tuple[Step | None, Step | None]:
        """The collective steps, there and back."""
        return self.forward, self.backward

    @property
    def chunked(self) -> tuple[int, ...]:
        """Products that run chunk by chunk in the forward pass."""
        return self.products[: self.first] if self.first else self.products

    @property
    def early(self) -> tuple[int, ...]:
        """Products that run earlier than in the graph, right behind the identity."""
        if self.at not in self.products:
            return self.products
        return tuple([at for at in self.products if at != self.at])


def overlaps_of(bound: BoundPlan, operators: Iterable[int] | None = None) -> tuple[Overlap, ...]:
    """The overlaps that a plan has, all or those of some operators, in the order of their readers.

    If all are asked for, raises PlanFileError for one that the plan names and cannot have.
    """
    named = {name: ((there, back), first) for name, there, back, first in bound.plan.training.tensor_overlap}
    if not named:
        return ()
    if operators is None:
        key = ("overlaps", stage_ends(bound), bound.plan.training.tensor_overlap)
        return bound.once(key, lambda: _all_that_are(bound, named))
    chosen = ((one, named.get(name_of(one, bound))) for one in possible_overlaps(bound, operators))
    chunked = (in_chunks(one, bound, *how) for one, how in chosen if how is not None)
    return tuple(one for one in chunked if one is not None)


def _all_that_are(bound: BoundPlan, named: Mapping[str, tuple[tuple[int, int], int]]) -> tuple[Overlap, ...]:
    """The overlaps that are `named`, with their chunks; in blocks that are alike they are cut alike."""
    found, missing, cut = list[Overlap](), set(named), dict[int, Overlap | None]()
    for one, like in _every(bound):
        if like == len(cut):
            name = name_of(one, bound)
            cut[like] = in_chunks(one, bound, *named[name]) if name in named else None
            missing -= {name} if cut[like] is not None else set()
        alike = cut[like]
        if alike is not None:
            found.append(_with_chunks(one, alike.chunks, alike.first, alike.dims))
    if missing:
        name = min(missing)
        (there, back), first = named[name]
        more = f", or no product more than {first}" if first else ""
        raise PlanFileError(
            f"training.tensor_overlap: '{name}' has no collective that runs under its product, or none whose rows"
            f" {there} and {back} chunks divide{more}; leave it out, or take 1 and 1"
        )
    return tuple(found)


def possible_overlaps(bound: BoundPlan, operators: Iterable[int] | None = None) -> Iterator[Overlap]:
    """All overlaps that a plan could have, or those of some operators, with one chunk there and one back."""
    return _Finder(bound).found(range(len(bound.operators)) if operators is None else operators)


def unlike_overlaps(bound: BoundPlan) -> tuple[Overlap, ...]:
    """`possible_overlaps` of one of the blocks that have the same, and of what stands outside of blocks."""
    like, numbers = unlike(bound), bound.blocks.numbers
    blocks = ((one, numbers.get(one.reader, -1)) for one, _ in _every(bound))
    return tuple(one for one, block in blocks if like.get(block, block) == block)


def unlike(bound: BoundPlan, behind: int = 0) -> Mapping[int, int]:
    """For every block the first block that has the same overlaps at the same places. Both are of one group and stage;
    so are the two blocks before each, from whose layouts their operands come, and as many `behind` them."""
    blocks, stages = bound.blocks, stage_of_operators(bound)
    groups = {group.first_block + k: at for at, group in enumerate(bound.plan.groups) for k in range(group.blocks)}
    runs = [(groups[block], stages[blocks.borders[block]], blocks.kinds[block]) for block in range(blocks.count)]
    found = dict[int, int]()
    for block in range(blocks.count):
        around = runs[max(0, block - 2) : block + 1 + behind]
        alike = len(around) == 3 + behind and len(set(around)) == 1
        found[block] = found[block - 1] if alike else block
    return found


def _every(bound: BoundPlan) -> tuple[tuple[Overlap, int], ...]:
    """`possible_overlaps` of all operators. Each comes with the number, in order, of the first one that it is like:
    blocks that are alike have the same overlaps."""
    return bound.once(("every overlap", stage_ends(bound)), lambda: tuple(_each(bound)))


def _each(bound: BoundPlan) -> Iterator[tuple[Overlap, int]]:
    blocks, like, finder, numbers = bound.blocks, unlike(bound, 1), _Finder(bound), count()
    known = dict[int, list[tuple[Overlap, int]]]()
    for one in finder.found(range(blocks.start)):
        yield one, next(numbers)
    for block in range(blocks.count):
        first = like[block]
        if first == block:
            known[block] = [(one, next(numbers)) for one in finder.found(blocks.operators(block))]
        shift = blocks.borders[block] - blocks.borders[first]
        yield from [(_shifted(one, shift, bound), number) for one, number in known[first]] if shift else known[first]
    for one in finder.found(range(blocks.stop, len(bound.operators))):
        yield one, next(numbers)


def _shifted(one: Overlap, shift: int, bound: BoundPlan) -> Overlap:
    """The overlap of a block as the overlap of another, whose operators are `shift` places behind."""
    reader = one.reader + shift
    return Overlap(
        kind=one.kind,
        at=one.at + shift,
        reader=reader,
        place=one.place,
        value=bound.graph.operators[reader].operands[one.place],
        products=tuple([at + shift for at in one.products]),
        forward=one.forward,
        backward=one.backward,
        chunks=one.chunks,
        first=one.first,
        dims=one.dims,
    )


def _with_chunks(one: Overlap, chunks: tuple[int, int], first: int, dims: tuple[int, int]) -> Overlap:
    """An overlap with this number of chunks, along these dims."""
    return Overlap(
        kind=one.kind,
        at=one.at,
        reader=one.reader,
        place=one.place,
        value=one.value,
        products=one.products,
        forward=one.forward,
        backward=one.backward,
        chunks=chunks,
        first=first,
        dims=dims,
    )


def name_of(one: Overlap, bound: BoundPlan) -> str:
    """The name of an overlap in a plan."""
    return bound.graph.operators[bound.blocks.template(one.at)].name


def in_chunks(one: Overlap, bound: BoundPlan, chunks: tuple[int, int], first: int = 0) -> Overlap | None:
    """An overlap with these numbers of chunks there and back, and its `first` products in chunks; None where no dim of
    its rows divides into the chunks, or where it has no more products than `first`."""
    dims = [_dim(one, bound, step, number) for step, number in zip(one.steps, chunks, strict=True)]
    if None in dims or (first and first >= len(one.products)):
        return None
    there, back = (dim or 0 for dim in dims)
    return _with_chunks(one, chunks, first, (there, back))


def is_product(graph: OperatorGraph, op: Operator) -> bool:
    """Whether an operator is a linear layer by parameters."""
    return op.op == LINEAR and len(op.operands) > 1 and all(name in graph.parameter_names for name in op.operands[1:])


def is_shared(one: Overlap, graph: OperatorGraph) -> bool:
    """Whether other operators than its products read the operand that an identity shares out."""
    if one.at in one.products:
        return False
    (name,) = (name for name in graph.operators[one.at].results if name is not None)
    return bool(set(graph.consumers[name]) - set(one.products))


def in_order(operators: Sequence[int], behind: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Operators in the order in which they run: products right behind the identity whose operand they read
    (`behind`)."""
    moved = [at for at in operators if at in behind] if behind else []
    if not moved:
        return tuple(operators)
    early = {product for at in moved for product in behind[at]}
    return tuple([one for at in operators if at not in early for one in (at, *behind.get(at, ()))])


class _Finder:
    def __init__(self, bound: BoundPlan) -> None:
        self.bound, self.graph, self.mesh = bound, bound.graph, bound.plan.mesh
        self.stages = stage_of_operators(bound)
        self.promised = bound.promised
        self.replays: Sequence[Replay] = replays(bound.graph, bound.blocks)
        self.renewed = {content for _, content in bound.graph.updates}
        self.known: dict[object, tuple[Step | None, Step | None] | None] = {}

    def found(self, operators: Iterable[int]) -> Iterator[Overlap]:
        taken: set[int] = set()  # products
        for reader in operators:
            for place, name in enumerate(self.bound.operators[reader].operator.operands):
                one = self._overlap(reader, place, name)
                if one is not None and not taken.intersection(one.products):
                    taken.update(one.products)
                    yield one

    def _overlap(self, reader: int, place: int, name: str) -> Overlap | None:
        """The overlap of a collective that brings an operand, with the products that it runs under."""
        maker = self.graph.producer.get(name)
        if maker is None or name not in self.graph.data_dependent:
            return None
        if self.graph.trains and not self.graph.graded(self.graph.operators[reader])[place]:
            return None
        steps = self._steps(name, self.promised[name], self.bound.operators[reader].layouts.operands[place])
        if steps is None:
            return None
        if self._product(maker) and not self.bound.is_kept(maker) and self._alone(name, reader, maker):
            return self._of("result", maker, reader, place, name, (maker,), *steps)
        products = self._readers(reader, place)
        return self._of("operand", reader, reader, place, name, products, *steps) if products else None

    def _of(
        self,
        kind: Kind,
        at: int,
        reader: int,
        place: int,
        name: str,
        products: tuple[int, ...],
        forward: Step | None,
        backward: Step | None,
    ) -> Overlap | None:
        rows = range(len(self.graph.types[name].shape) - 1)
        for step, kinds in ((forward, THERE[kind]), (backward, BACK[kind])):
            if step is not None and (step.kind not in kinds or (step.kind != "all_reduce" and step.dim not in rows)):
                return None
        if forward and backward and "all_reduce" not in (forward.kind, backward.kind) and forward.dim != backward.dim:
            return None
        if not self._computed_again_alike(kind, at, reader, products):
            return None
        return Overlap(
            kind=kind,
            at=at,
            reader=reader,
            place=place,
            value=name,
            products=products,
            forward=forward,
            backward=backward,
        )

    def _steps(self, name: str, made: Duplex, wanted: Duplex) -> tuple[Step | None, Step | None] | None:
        """The step there and the step back; None where there are several, or none at all. Blocks share layouts, so the
        steps are found again by the identity of the layouts."""
        shape, sequences = self.graph.types[name].shape, self.bound.sequences.get(name, frozenset())
        ways = [(made.forward, wanted.forward)]
        if name in self.graph.differentiable:
            ways.append((wanted.gradient, made.gradient))
        key = (shape, id(made), id(wanted), sequences, len(ways))
        if key not in self.known:
            self.known[key] = self._sent(shape, ways, sequences)
        return self.known[key]

    def _sent(
        self, shape: tuple[int, ...], ways: Sequence[tuple[Layout, Layout]], sequences: frozenset[int]
    ) -> tuple[Step | None, Step | None] | None:
        found = []
        for source, target in ways:
            steps = redistribution(shape, self.mesh, source, target, sequences)
            steps = tuple(step for step in steps if self.mesh.sizes[step.axis] > 1)
            if len(steps) > 1 or any(step.zigzag for step in steps):
                return None
            found.append(steps[0] if steps else None)
        there, back = found[0], found[1] if len(found) > 1 else None
        return None if there is None and back is None else (there, back)

    def _product(self, at: int) -> bool:
        return is_product(self.graph, self.bound.operators[at].operator)

    def _alone(self, name: str, reader: int, maker: int) -> bool:
        """Whether a result is read once, in its own block."""
        uses = tuple(self.graph.consumers.get(name, ()))
        once = uses == (reader,) and self.bound.operators[reader].operator.operands.count(name) == 1
        return once and self._together(maker, reader) and name not in self.renewed and name != self.graph.loss

    def _readers(self, reader: int, place: int) -> tuple[int, ...]:
        """The products that read an operand: the reader itself, or the readers of the value that it shares out."""
        if place == 0 and self._product(reader):
            return (reader,)
        op = self.bound.operators[reader]
        if op.operator.op != IDENTITY or self.bound.is_kept(reader):
            return ()
        (shared,) = (name for name in op.operator.results if name is not None)
        made = op.layouts.results[0]
        return tuple(
            use
            for use in dict.fromkeys(self.graph.consumers.get(shared, ()))
            if self._product(use)
            and self._together(reader, use)
            and self.bound.operators[use].layouts.operands[0] == made
            and self.bound.operators[use].operator.operands.count(shared) == 1
        )

    def _together(self, one: int, other: int) -> bool:
        """Whether two operators run in the same block of the same stage, or before or after all blocks."""
        return self.stages[one] == self.stages[other] and self._where(one) == self._where(other)

    def _where(self, at: int) -> int:
        block = self.bound.blocks.block_of(at)
        return block if block is not None else -1 if at < self.bound.blocks.start else self.bound.blocks.count

    def _computed_again_alike(self, kind: str, at: int, reader: int, products: Sequence[int]) -> bool:
        """Whether a recomputed block computes all of it again, or, for a result, neither the product nor the
        redistribution."""
        block = self.bound.blocks.block_of(at)
        if block is None or self.bound.recompute_of(block) is None:
            return True
        replay = self.replays[self.bound.blocks.kinds[block]]
        works = {self.bound.place_of(one) < replay.works for one in (at, *products)}
        if kind == "operand":
            return works == {True}
        return works == {self.bound.place_of(reader) < replay.moves}


def _dim(one: Overlap, bound: BoundPlan, step: Step | None, chunks: int) -> int | None:
    """The dim of the rows along which chunks are cut: preferably a dim whose chunks lie in memory without gaps, and not
    the dim that is redistributed."""
    shape, sizes = bound.graph.types[one.value].shape, bound.plan.mesh.sizes
    made = bound.operators[bound.graph.producer[one.value]]
    place = [name for name in made.operator.results if name is not None].index(one.value)
    ends = (made.layouts.results[place], bound.operators[one.reader].layouts.operands[one.place])
    pieces = [local_shape(shape, end.forward, sizes) for end in ends]
    moved = step.dim if step is not None else -1
    fitting = [dim for dim in range(len(shape) - 1) if all(piece[dim] % chunks == 0 for piece in pieces)]
    order = sorted(fitting, key=lambda dim: (math.prod(pieces[0][:dim]) > 1, dim == moved, dim))
    return order[0] if order else None
