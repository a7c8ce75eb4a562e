"""Products under which tensor parallelism communicates: which collectives of a plan are taken apart into chunks.

    operand     x ─all-gather─> [identity ─>] products      chunk k of x is multiplied while chunk k + 1 arrives; back,
                                                            the gradient of chunk k leaves while that of k + 1 is made
    result      x ─> product ─reduce-scatter─> reader       the other way round; an all-reduce likewise

A product is a linear layer by a parameter. A collective and its products are taken together, in an *overlap*: the one
that brings the operand of one product, or of several that read the same value through its identity, or the one that
takes what a product has made to its only reader. It must be one step along one axis, there and back, and no more. The
rows of a tensor, all of its dims but the last, are cut into chunks along one of them, which their number divides.
Several products of one operand run as soon as it arrives: they are taken out of the order of the graph.

A plan names those that it has, by the operator that does them in the first block of its kind, with their chunks there
and back, and how many products run in chunks (`Training.tensor_overlap`): the results of a product in chunks are copied
once more, so those that are not needed to cover the collective run when all of the operand is there. With one chunk the
gradient of an operand still leaves under the products of weight gradients, and all else waits. Everything else follows,
so that prices, audits and the runtime agree. Where a recomputed block keeps what products of an operand have made, the
operand comes again without them. There are none of a product whose result a recomputed block keeps and sends, of what
goes into another block or stage, and of what is cut along the dim that is summed up.

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
"""The operator that is taken apart: of rows, a weight, and perhaps a bias."""

Kind: TypeAlias = Literal["operand", "result"]

THERE: Mapping[Kind, frozenset[str]] = {
    "operand": frozenset({"all_gather"}),
    "result": frozenset({"reduce_scatter", "all_reduce"}),
}
BACK: Mapping[Kind, frozenset[str]] = {"operand": THERE["result"], "result": THERE["operand"]}
"""Collectives that are taken apart, of a value and of its gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """A collective and the products that it runs under.

    Attributes:
        kind: whether it brings the operand of the products, or takes the result of one.
        at: the operator that does all of it, by its index: an identity or a product.
        reader, place: the operand that is moved.
        value: its name.
        products: operators.
        forward, backward: the steps of the value, and of its gradient; None where nothing is sent.
        chunks: of each way.
        first: of the products of an operand, so many run chunk by chunk while it arrives, the others when all of it is
            there; 0 for all.
        dims: of the rows, along which they are cut.
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
        """What is sent, there and back."""
        return self.forward, self.backward

    @property
    def chunked(self) -> tuple[int, ...]:
        """Products that run chunk by chunk on the way there."""
        return self.products[: self.first] if self.first else self.products

    @property
    def early(self) -> tuple[int, ...]:
        """Products that run before their turn in the graph, right behind the identity."""
        if self.at not in self.products:
            return self.products
        return tuple([at for at in self.products if at != self.at])


def overlaps_of(bound: BoundPlan, operators: Iterable[int] | None = None) -> tuple[Overlap, ...]:
    """The overlaps that a plan has, all or those of some operators, in the order of their readers.

    Raises PlanFileError for one of all that it names and cannot have.
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
    """Those that are `named`, with their chunks; those of blocks like others are cut as theirs."""
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
    """All that a plan could have, or those of some operators, with one chunk there and one back."""
    return _Finder(bound).found(range(len(bound.operators)) if operators is None else operators)


def unlike_overlaps(bound: BoundPlan) -> tuple[Overlap, ...]:
    """`possible_overlaps` of one of the blocks that have the same, and of what stands outside of blocks."""
    like, numbers = unlike(bound), bound.blocks.numbers
    blocks = ((one, numbers.get(one.reader, -1)) for one, _ in _every(bound))
    return tuple(one for one, block in blocks if like.get(block, block) == block)


def unlike(bound: BoundPlan, behind: int = 0) -> Mapping[int, int]:
    """Of every block the first that has the same overlaps, in the places of its own: they are of one group and stage,
    and so are two blocks before both, from whose layouts their operands come, and as many `behind` them."""
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
    """`possible_overlaps` of all operators, each with the number, in order, of the one that it is like: those of blocks
    like others are theirs."""
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
    """An overlap of a block as that of another, so many operators behind."""
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
    """An overlap in so many chunks, along these dims."""
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
    """What a plan calls an overlap."""
    return bound.graph.operators[bound.blocks.template(one.at)].name


def in_chunks(one: Overlap, bound: BoundPlan, chunks: tuple[int, int], first: int = 0) -> Overlap | None:
    """An overlap in so many chunks there and back, with its `first` products in chunks; None where no dim of its rows
    divides into them, or where it has no more products than those."""
    dims = [_dim(one, bound, step, number) for step, number in zip(one.steps, chunks, strict=True)]
    if None in dims or (first and first >= len(one.products)):
        return None
    there, back = (dim or 0 for dim in dims)
    return _with_chunks(one, chunks, first, (there, back))


def is_product(graph: OperatorGraph, op: Operator) -> bool:
    """Whether an operator is a linear layer by parameters."""
    return op.op == LINEAR and len(op.operands) > 1 and all(name in graph.parameter_names for name in op.operands[1:])


def is_shared(one: Overlap, graph: OperatorGraph) -> bool:
    """Whether others than its products read the operand that an identity shares out."""
    if one.at in one.products:
        return False
    (name,) = (name for name in graph.operators[one.at].results if name is not None)
    return bool(set(graph.consumers[name]) - set(one.products))


def in_order(operators: Sequence[int], behind: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Operators as they run: products right behind the identity whose operand they read, as `behind` has them."""
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
        """What brings an operand, with the products it runs under."""
        maker = self.graph.producer.get(name)
        if maker is None or name not in self.graph.data_dependent:
            return None
        if self.graph.trains and name not in self.graph.differentiable:
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
        """The step there and the step back; None where there are more, or none at all. Blocks share layouts, by whose
        identity they are found again."""
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
        """The products that read an operand: the reader itself, or those of the value that it shares out."""
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
        """Whether a recomputed block computes all of it again, or of a result neither the product nor its way."""
        block = self.bound.blocks.block_of(at)
        if block is None or self.bound.recompute_of(block) is None:
            return True
        replay = self.replays[self.bound.blocks.kinds[block]]
        works = {self.bound.place_of(one) < replay.works for one in (at, *products)}
        if kind == "operand":
            return works == {True}
        return works == {self.bound.place_of(reader) < replay.moves}


def _dim(one: Overlap, bound: BoundPlan, step: Step | None, chunks: int) -> int | None:
    """The dim of the rows along which chunks are cut: where it can be one whose chunks lie in memory without gaps, and
    not the one that is moved."""
    shape, sizes = bound.graph.types[one.value].shape, bound.plan.mesh.sizes
    made = bound.operators[bound.graph.producer[one.value]]
    place = [name for name in made.operator.results if name is not None].index(one.value)
    ends = (made.layouts.results[place], bound.operators[one.reader].layouts.operands[one.place])
    pieces = [local_shape(shape, end.forward, sizes) for end in ends]
    moved = step.dim if step is not None else -1
    fitting = [dim for dim in range(len(shape) - 1) if all(piece[dim] % chunks == 0 for piece in pieces)]
    order = sorted(fitting, key=lambda dim: (math.prod(pieces[0][:dim]) > 1, dim == moved, dim))
    return order[0] if order else None
