"""Buckets: parameters whose gradients, or new weights, travel together.

    gradients arrive   head, block 9, block 8, ...        (last used first)
    moves              (all_reduce, axis 0) for some      (reduce_scatter, axis 0) for others
    buckets            one open for each kind of moves; full at a number of bytes, or where the plan says so

All members of a bucket take the same collectives on the same axes, in the same dtype. Each collective of a bucket sends
one message with the data of every member. Pricing and execution take the buckets from here; they are the same on every
rank of a stage. One pass over the parameters.

Buckets start in the backward pass, as soon as they are full. A bucket needs memory for a flat copy of its members and
for the result of its first collective. It frees its members as soon as the copy is made, and the copy when the
collective has finished. `in_room` starts a bucket early only where this memory fits beside the buckets in flight; where
it does not fit, the bucket waits for the oldest of them. So buckets cost no memory that grows with the model, and the
backward pass does not wait for an all-reduce, which needs no memory of its own once it is in flight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from planner.graph.operator_graph import OperatorGraph
from planner.graph.part_names import parameter_matches
from planner.sharding.layout import Layout, local_share
from planner.sharding.mesh import Mesh
from planner.sharding.redistribute import COLLECTIVES, Step, redistribution
from planner.sharding.update import Buckets, bucket_numbers, split_positions

Moves = tuple[tuple[str, int], ...]
"""Kind and axis of each collective, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traveller:
    """A parameter to be sent: its dtype and the bytes `held` before, all `steps` of its redistribution, and the bytes
    of its message in each collective; the collectives are its `moves`. A parameter that is reduced to one device shares
    a bucket only with others for the same device: `to` has the places of that device on the axes."""

    name: str
    dtype: str
    held: float
    steps: tuple[Step, ...]
    nbytes: tuple[float, ...]
    moves: Moves
    to: tuple[int, ...] = ()

    def called(self, name: str) -> "Traveller":
        """The same redistribution of another parameter."""
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
    """Parameters that share their messages, in the order in which they arrive."""

    members: tuple[Traveller, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    @property
    def moves(self) -> Moves:
        return self.members[0].moves

    @cached_property
    def nbytes(self) -> tuple[float, ...]:
        """Bytes of the message of each collective."""
        return tuple([sum(every) for every in zip(*[member.nbytes for member in self.members], strict=True)])

    @property
    def flat(self) -> float:
        """Bytes of the largest message, which has a buffer of its own where there are several members."""
        return max(self.nbytes, default=0.0) if len(self.members) > 1 else 0.0

    def comes(self, mesh: Mesh, number: int = 0) -> float:
        """Bytes of the result of its first collective, or of collective `number`, that need memory of their own: none
        of an all-reduce or a reduce."""
        (kind, axis), nbytes = self.moves[number], self.nbytes[number]
        return {"all_reduce": 0.0, "reduce": 0.0, "reduce_scatter": nbytes / mesh.sizes[axis]}.get(kind, nbytes)

    def takes(self, mesh: Mesh, number: int = 0) -> float:
        """Bytes that its first collective, or collective `number`, needs beside its members: the result, and a flat
        copy of the members with any padding. A single member that lies in memory as it is sent needs no copy."""
        step = [step for step in self.members[0].steps if step.kind in COLLECTIVES][number]
        lies = step.kind in ("all_reduce", "reduce") or (step.dim == 0 and not step.padding)
        as_it_is = lies and len(self.members) == 1
        return self.comes(mesh, number) + (0.0 if as_it_is else self.nbytes[number])

    def frees(self, mesh: Mesh) -> float:
        """Bytes of its members that are free when its first collective has finished, less those of the result."""
        comes = self.comes(mesh)
        return sum(member.held for member in self.members) - comes if comes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """Buckets in the order in which they start. The first `early` of them start in the backward pass, when their last
    member has arrived; the others start after it. When bucket i starts, the first `landed[i]` buckets have finished,
    and the others before it may be in flight. `room` are the bytes that early buckets take beside the gradients that
    are accumulated."""

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
    """The redistribution of a parameter of a global `shape` from one layout to another."""
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
    """The buckets of parameters, in the order in which they are full. A parameter that sends nothing is in none.

    `positions` are those among the trainable parameters of the model; a parameter in `alone` shares no bucket.
    """
    size = buckets if isinstance(buckets, int) else 0
    open_: dict[object, list[Traveller]] = {}
    filled: dict[object, list[float]] = {}  # bytes of each message of the buckets in `open_`
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
    """When buckets start. `buckets` come in the order in which they are full; a bucket that takes more than `room` and
    the memory that earlier buckets have freed lets later ones go first."""
    waiting, early, freed, taken = list(buckets), list[Bucket](), 0.0, 0.0
    while (at := next((at for at, one in enumerate(waiting) if one.takes(mesh) <= room + freed), None)) is not None:
        one = waiting.pop(at)
        early.append(one)
        taken = max(taken, one.takes(mesh) - freed)
        freed += one.frees(mesh)
    landed = (*_landed(early, mesh, taken), *range(len(early), len(buckets)))
    return Starts(buckets=(*early, *waiting), early=len(early), landed=landed, room=taken)


def _landed(early: Sequence[Bucket], mesh: Mesh, room: float) -> list[int]:
    """How many earlier buckets have finished when each early one starts: as few as satisfy

    bytes that it takes + results of the buckets in flight - bytes that the finished buckets have freed <= room

    where `room` is what the buckets need that start one by one."""
    found, landed, taken = list[int](), 0, 0.0
    for at, one in enumerate(early):
        while taken + one.takes(mesh) > room and landed < at:
            taken -= early[landed].comes(mesh) + early[landed].frees(mesh)
            landed += 1
        found.append(landed)
        taken += one.comes(mesh)
    return found


def bucket_place(name: str, buckets: Buckets, position: int) -> object:
    """A key that members of one bucket have in common; None for a parameter that goes by itself."""
    if isinstance(buckets, int):
        return 0
    if splits := split_positions(buckets):
        return sum(split <= position for split in splits)
    return next((number for pattern, number in bucket_numbers(buckets) if parameter_matches(name, pattern)), None)


def trainable_positions(graph: OperatorGraph) -> Mapping[str, int]:
    """Positions of the trainable parameters among each other, in the order of the model."""
    if ("trainable",) not in graph.derived:
        names = [parameter.name for parameter in graph.parameters if parameter.name in graph.differentiable]
        graph.derived["trainable",] = {name: at for at, name in enumerate(names)}
    return cast("Mapping[str, int]", graph.derived["trainable",])


def arrival_order(graph: OperatorGraph) -> tuple[str, ...]:
    """Trainable parameters in the order in which a backward pass has their gradients: the parameter whose first use is
    the last comes first. Parameters that no operator reads come at the end."""
    if ("arrival",) not in graph.derived:
        first = {name: uses[0] for name, uses in graph.consumers.items()}
        order = sorted(trainable_positions(graph), key=lambda name: (-first.get(name, -1), name))
        graph.derived["arrival",] = tuple(order)
    return cast("tuple[str, ...]", graph.derived["arrival",])
