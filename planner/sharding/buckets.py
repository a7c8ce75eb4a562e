"""Buckets: parameters whose gradients, or new weights, travel together.

    gradients arrive   head, block 9, block 8, ...        (last used first)
    moves              (all_reduce, axis 0) for some      (reduce_scatter, axis 0) for others
    buckets            one open for each kind of moves; full at so many bytes, or where the plan says so

The members of a bucket take the same collectives on the same axes, in the same dtype. Each collective is then one
message, which has in it what each member would have sent. Who is with whom is decided here, for all who price and
execute plans, and is the same on every rank of a stage. One pass over the parameters.

Buckets start in the backward pass, as soon as they are full. A bucket takes a flat copy of its members and what comes
out of its first collective; its members are free from then on, and the copy when it has landed. `in_room` lets it start
early only where there is room for that, beside others that are still under way: as many of them as fit, the oldest are
waited for where more would not. So buckets cost no memory that grows with the model, and the backward pass does not
wait for an all-reduce, which needs no memory of its own once it is under way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from planner.graph.operator_graph import OperatorGraph
from planner.matching import matches
from planner.sharding.layout import Layout, local_share
from planner.sharding.mesh import Mesh
from planner.sharding.redistribute import COLLECTIVES, Step, redistribution
from planner.sharding.update import Buckets, bucket_numbers, split_positions

Moves = tuple[tuple[str, int], ...]
"""Kind and axis of each collective, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traveller:
    """A parameter that travels: its dtype and bytes `held` before, all steps on its way, and the bytes of its message
    in each collective, which are its `moves`. What goes to one device goes with others to the same: `to` are its places
    on the axes."""

    name: str
    dtype: str
    held: float
    steps: tuple[Step, ...]
    nbytes: tuple[float, ...]
    moves: Moves
    to: tuple[int, ...] = ()

    def called(self, name: str) -> "Traveller":
        """The same of another parameter."""
        if name == self.name:
            return self
        return Traveller(
            name=name,
            dtype=self.dtype,
            held=self.held,
            steps=self.steps,
            nbytes=self.nbytes,
            moves=self.moves,
            to=self.to,
        )


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Travellers that go together, in the order in which they arrive."""

    members: tuple[Traveller, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    @property
    def moves(self) -> Moves:
        return self.members[0].moves

    @cached_property
    def nbytes(self) -> tuple[float, ...]:
        """Of the message of each collective."""
        return tuple([sum(every) for every in zip(*[member.nbytes for member in self.members], strict=True)])

    @property
    def flat(self) -> float:
        """Bytes of the largest message, which has a buffer of its own where there are several members."""
        return max(self.nbytes, default=0.0) if len(self.members) > 1 else 0.0

    def comes(self, mesh: Mesh, number: int = 0) -> float:
        """Bytes that come out of its first collective, or of another, in memory of their own; an all-reduce needs none,
        nor a reduce."""
        (kind, axis), nbytes = self.moves[number], self.nbytes[number]
        return {"all_reduce": 0.0, "reduce": 0.0, "reduce_scatter": nbytes / mesh.sizes[axis]}.get(kind, nbytes)

    def takes(self, mesh: Mesh, number: int = 0) -> float:
        """Bytes that its first collective, or another, takes beside its members: a flat copy of them, with any padding,
        unless a lone one lies in memory as it is sent, and what comes out."""
        step = [step for step in self.members[0].steps if step.kind in COLLECTIVES][number]
        lies = step.kind in ("all_reduce", "reduce") or (step.dim == 0 and not step.padding)
        as_it_is = lies and len(self.members) == 1
        return self.comes(mesh, number) + (0.0 if as_it_is else self.nbytes[number])

    def frees(self, mesh: Mesh) -> float:
        """Bytes of its members that are free when it has arrived."""
        comes = self.comes(mesh)
        return sum(member.held for member in self.members) - comes if comes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """Buckets in the order in which they start: the first so many `early`, in the backward pass, when the last of their
    members has arrived; the rest behind it. Of those before it so many have `landed` when a bucket starts, the others
    may be under way. `room` are the bytes that the early ones take beside what is added up."""

    buckets: tuple[Bucket, ...] = ()
    early: int = 0
    landed: tuple[int, ...] = ()
    room: float = 0.0


def moves_of(steps: Sequence[Step]) -> Moves:
    """The collectives of some steps."""
    return tuple((step.kind, step.axis) for step in steps if step.kind in COLLECTIVES)


def traveller(
    name: str, shape: Sequence[int], dtype: str, element_bytes: int, mesh: Mesh, source: Layout, target: Layout
) -> Traveller:
    """What a parameter of a global `shape` sends on its way from one layout to another."""
    steps = tuple(s for s in redistribution(shape, mesh, source, target) if mesh.sizes[s.axis] > 1)
    whole = element_bytes
    for extent in shape:
        whole *= extent
    return Traveller(
        name=name,
        dtype=dtype,
        held=local_share(shape, source, mesh.sizes) * whole,
        steps=steps,
        nbytes=tuple(step.fraction * whole for step in steps if step.kind in COLLECTIVES),
        moves=moves_of(steps),
    )


def in_buckets(
    travellers: Sequence[Traveller], buckets: Buckets, positions: Mapping[str, int], alone: frozenset[str]
) -> tuple[Bucket, ...]:
    """The buckets of what travels, in the order in which they are full; who sends nothing is in none.

    `positions` are those among the trainable parameters of the model; who is `alone` shares no bucket.
    """
    size = buckets if isinstance(buckets, int) else 0
    open_: dict[object, list[Traveller]] = {}
    filled: dict[object, list[float]] = {}  # bytes of each message of those
    done: list[Bucket] = []
    for one in travellers:
        place = None if one.name in alone else bucket_place(one.name, buckets, positions[one.name])
        if not one.moves:
            continue
        if place is None:
            done.append(Bucket(members=(one,)))
            continue
        key = (place, one.moves, one.dtype, one.to)
        more = [before + own for before, own in zip(filled.get(key, ()), one.nbytes, strict=False)]
        if size and key in open_ and max(more) > size:
            done.append(Bucket(members=tuple(open_.pop(key))))
            more = []
        filled[key] = more or list(one.nbytes)
        open_.setdefault(key, []).append(one)
    last = {one.name: at for at, one in enumerate(travellers)}
    whole = [*done, *(Bucket(members=tuple(members)) for members in open_.values())]
    return tuple(sorted(whole, key=lambda bucket: last[bucket.members[-1].name]))


def in_room(buckets: Sequence[Bucket], mesh: Mesh, room: float) -> Starts:
    """When buckets start, given in the order in which they are full: one that takes more than the `room` and what those
    before it have freed lets others go first."""
    waiting, early, freed, taken = list(buckets), list[Bucket](), 0.0, 0.0
    while (at := next((at for at, one in enumerate(waiting) if one.takes(mesh) <= room + freed), None)) is not None:
        one = waiting.pop(at)
        early.append(one)
        taken = max(taken, one.takes(mesh) - freed)
        freed += one.frees(mesh)
    landed = (*_landed(early, mesh, taken), *range(len(early), len(buckets)))
    return Starts(buckets=(*early, *waiting), early=len(early), landed=landed, room=taken)


def _landed(early: Sequence[Bucket], mesh: Mesh, room: float) -> list[int]:
    """How many have landed when each starts: as few as leave room for it,

    takes of it + what comes out of those under way - what those that have landed have freed <= room

    where room is what they need that start one by one."""
    found, landed, taken = list[int](), 0, 0.0
    for at, one in enumerate(early):
        while taken + one.takes(mesh) > room and landed < at:
            taken -= early[landed].comes(mesh) + early[landed].frees(mesh)
            landed += 1
        found.append(landed)
        taken += one.comes(mesh)
    return found


def bucket_place(name: str, buckets: Buckets, position: int) -> object:
    """What members of a bucket have in common; None for who goes by itself."""
    if isinstance(buckets, int):
        return 0
    if splits := split_positions(buckets):
        return sum(split <= position for split in splits)
    return next((number for pattern, number in bucket_numbers(buckets) if matches(name, pattern)), None)


def trainable_positions(graph: OperatorGraph) -> Mapping[str, int]:
    """Positions of the trainable parameters among each other, in the order of the model."""
    if ("trainable",) not in graph.derived:
        names = [parameter.name for parameter in graph.parameters if parameter.name in graph.differentiable]
        graph.derived["trainable",] = {name: at for at, name in enumerate(names)}
    return cast("Mapping[str, int]", graph.derived["trainable",])


def arrival_order(graph: OperatorGraph) -> tuple[str, ...]:
    """Trainable parameters in the order in which a backward pass has their gradients: who is first read last. Those
    that nobody reads come at the end."""
    if ("arrival",) not in graph.derived:
        first = {name: uses[0] for name, uses in graph.consumers.items()}
        order = sorted(trainable_positions(graph), key=lambda name: (-first.get(name, -1), name))
        graph.derived["arrival",] = tuple(order)
    return cast("tuple[str, ...]", graph.derived["arrival",])
