"""Formulas of what masks say: numbers computed from positions and from numbers of the batch, and conditions on them.

    Linear    steps x indices + number          AtLeast    a linear value is at least 0
    Chunk     the chunk that an index lies in   SameChunk  two indices are in one chunk
    OfBatch   numbers of the batch, by place    Equal, Seen, Apart    relations of such numbers at one place or two
    Choice    one number where a condition holds, another elsewhere

A condition is a disjunction of conjunctions. `planner.graph.rewriting.mask_values` reads formulas off operators.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

Number = float | int

HIDES = -1e4
"""A number added to the scores of hidden keys is at most this: the least 16-bit number is -65,504."""

WIDE = ("int32", "int64", "float32", "float64")
"""Dtypes in which positions can be counted."""

EXACT = ("bool", *WIDE)
"""Dtypes in which positions and numbers of the batch are exact."""

MOST = 16
"""Most conjunctions of a condition; a mask with more is of no known kind."""


@dataclass(frozen=True, slots=True)
class AtLeast:
    """The linear value `steps` x indices + `number` is at least 0."""

    steps: tuple[int, ...]
    number: Number


@dataclass(frozen=True, slots=True)
class Equal:
    """Numbers of the batch are equal at two places; `holds` False: they differ. A place has the dim of the samples
    (None: there is one sample) and that of the position."""

    name: str
    places: frozenset["Place"]
    holds: bool = True


@dataclass(frozen=True, slots=True)
class Seen:
    """A number of the batch is not 0 at a place; `holds` False: it is."""

    name: str
    place: "Place"
    holds: bool = True

    @property
    def places(self) -> frozenset["Place"]:
        return frozenset({self.place})


@dataclass(frozen=True, slots=True)
class Apart:
    """A number of the batch at the first place, less that at the second, + `number` is at least 0."""

    name: str
    first: "Place"
    second: "Place"
    number: int

    @property
    def places(self) -> frozenset["Place"]:
        return frozenset({self.first, self.second})


@dataclass(frozen=True, slots=True)
class SameChunk:
    """Indices of two dims are in one chunk of `size`; `holds` False: they are in two."""

    dims: frozenset[int]
    size: int
    holds: bool = True


Place = tuple[int | None, int]

Atom = AtLeast | Equal | Seen | Apart | SameChunk

Condition = frozenset[frozenset[Atom]]

ALWAYS: Condition = frozenset({frozenset()})

NEVER: Condition = frozenset()


@dataclass(frozen=True, slots=True)
class Linear:
    """A number that is linear in the indices of the dims."""

    steps: tuple[int, ...]
    number: Number


@dataclass(frozen=True, slots=True)
class Choice:
    """One number where a condition holds, another elsewhere."""

    condition: Condition
    yes: Number
    no: Number
    rank: int


@dataclass(frozen=True, slots=True)
class OfBatch:
    """Numbers of the batch, one for each sample and position, + `more`: the value `name`, whose dims are at this place
    here."""

    name: str
    place: Place
    rank: int
    more: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """The index of a dim divided by `size`, rounded down."""

    dim: int
    size: int
    rank: int


Formula = Linear | Choice | OfBatch | Chunk


def moved(value: Formula, dims: Mapping[int, int], rank: int) -> Formula | None:
    """A value whose dim d is dim `dims[d]` of `rank` dims; None where a dim that it depends on is gone."""
    if isinstance(value, Linear):
        steps = _moved_steps(value.steps, dims, rank)
        return None if steps is None else Linear(steps, value.number)
    if isinstance(value, OfBatch):
        place = _moved_place(value.place, dims)
        return None if place is None else replace(value, place=place, rank=rank)
    if isinstance(value, Chunk):
        return replace(value, dim=dims[value.dim], rank=rank) if value.dim in dims else None
    found = [[_moved_atom(atom, dims, rank) for atom in every] for every in value.condition]
    if any(atom is None for every in found for atom in every):
        return None
    condition = frozenset(frozenset(atom for atom in every if atom is not None) for every in found)
    return replace(value, condition=condition, rank=rank)


def _moved_atom(atom: Atom, dims: Mapping[int, int], rank: int) -> Atom | None:
    if isinstance(atom, AtLeast):
        steps = _moved_steps(atom.steps, dims, rank)
        return None if steps is None else AtLeast(steps, atom.number)
    if isinstance(atom, Seen):
        place = _moved_place(atom.place, dims)
        return None if place is None else replace(atom, place=place)
    if isinstance(atom, Apart):
        first, second = _moved_place(atom.first, dims), _moved_place(atom.second, dims)
        return None if first is None or second is None else replace(atom, first=first, second=second)
    if isinstance(atom, SameChunk):
        kept_dims = frozenset(dims[dim] for dim in atom.dims if dim in dims)
        return replace(atom, dims=kept_dims) if len(kept_dims) == len(atom.dims) else None
    places = [_moved_place(place, dims) for place in atom.places]
    kept = frozenset(place for place in places if place is not None)
    return replace(atom, places=kept) if None not in places else None


def _moved_steps(steps: Sequence[int], dims: Mapping[int, int], rank: int) -> tuple[int, ...] | None:
    if any(step and dim not in dims for dim, step in enumerate(steps)):
        return None
    found = [0] * rank
    for dim, to in dims.items():
        found[to] = steps[dim]
    return tuple(found)


def _moved_place(place: Place, dims: Mapping[int, int]) -> Place | None:
    sample, position = place
    if position not in dims or (sample is not None and sample not in dims):
        return None
    return (None if sample is None else dims[sample]), dims[position]


class TooLongError(Exception):
    """A condition has more conjunctions than any known mask."""


def both(first: Condition, second: Condition) -> Condition:
    """Where two conditions hold. Raises TooLongError where that takes too many conjunctions."""
    if len(first) * len(second) > MOST**2:
        raise TooLongError
    return simpler(frozenset(a | b for a, b in product(first, second)))


def opposite(condition: Condition) -> Condition:
    """Where a condition does not hold. Raises TooLongError."""
    found = ALWAYS
    for every in condition:
        found = both(found, frozenset(frozenset({negated(atom)}) for atom in every))
    return found


def simpler(condition: Condition) -> Condition:
    """The condition without conjunctions that imply another one."""
    return frozenset(every for every in condition if not any(other < every for other in condition))


def negated(atom: Atom) -> Atom:
    """What holds where an atom does not."""
    if isinstance(atom, AtLeast):
        return AtLeast(tuple(-step for step in atom.steps), -atom.number - 1)
    if isinstance(atom, Apart):
        return Apart(atom.name, atom.second, atom.first, -atom.number - 1)
    return replace(atom, holds=not atom.holds)


def decided(condition: Condition, shape: Sequence[int]) -> Condition:
    """The condition without comparisons that hold for all indices, or for none."""
    found = set()
    for every in condition:
        left = set()
        for atom in every:
            if isinstance(atom, AtLeast):
                ends = [step * (extent - 1) for step, extent in zip(atom.steps, shape, strict=True)]
                if sum(min(end, 0) for end in ends) + atom.number >= 0:
                    continue
                if sum(max(end, 0) for end in ends) + atom.number < 0:
                    break
            elif isinstance(atom, SameChunk) and all(shape[dim] <= atom.size for dim in atom.dims):
                if atom.holds:
                    continue
                break
            left.add(atom)
        else:
            found.add(frozenset(left))
    return simpler(frozenset(found))


def is_exact(value: Formula | None, dtype: str) -> bool:
    """Whether a dtype has all of these numbers: in fewer bits positions are rounded, or wrap around to 0."""
    counts = (isinstance(value, Linear) and any(value.steps)) or (isinstance(value, OfBatch) and value.more != 0)
    return not counts or dtype in WIDE


def within(value: Formula | None, shape: Sequence[int], batch: tuple[int, int]) -> Formula | None:
    """A value of this shape. A dim of extent 1 has one index, which stays 0 where the dim is broadcast. A value that
    reads only a part of the numbers of the batch has no formula."""
    if isinstance(value, Linear):
        return replace(value, steps=_at_zero(value.steps, shape))
    if isinstance(value, Chunk):
        return value if shape[value.dim] > 1 else Linear((0,) * len(shape), 0)
    places = {value.place} if isinstance(value, OfBatch) else set[Place]()
    if isinstance(value, Choice):
        atoms = {atom for every in value.condition for atom in every}
        if any(isinstance(atom, SameChunk) and any(shape[dim] == 1 for dim in atom.dims) for atom in atoms):
            return None
        places = {place for atom in atoms if not isinstance(atom, AtLeast | SameChunk) for place in atom.places}
        plain = {a: replace(a, steps=_at_zero(a.steps, shape)) if isinstance(a, AtLeast) else a for a in atoms}
        condition = frozenset(frozenset(plain[atom] for atom in every) for every in value.condition)
        value = replace(value, condition=decided(condition, shape))
    samples, positions = batch
    whole = all(shape[at] == positions and (s is None or shape[s] == samples) for s, at in places)
    return value if whole else None


def _at_zero(steps: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(0 if extent == 1 else step for step, extent in zip(steps, shape, strict=True))


def as_choice(value: Formula | None) -> Choice | None:
    """A value as a choice between two numbers; a single number is the same one everywhere."""
    if isinstance(value, Linear):
        return Choice(ALWAYS, value.number, value.number, len(value.steps)) if not any(value.steps) else None
    return value if isinstance(value, Choice) else None


def condition_of(value: Formula | None) -> Condition | None:
    """Where a value is not 0."""
    if isinstance(value, OfBatch):
        return frozenset({frozenset({Seen(value.name, value.place)})}) if not value.more else None
    choice = as_choice(value)
    if choice is None:
        return None
    if bool(choice.yes) == bool(choice.no):
        return ALWAYS if choice.yes else NEVER
    return choice.condition if choice.yes else opposite(choice.condition)


def of_one_sample(value: OfBatch | Choice, dims: Mapping[int, int], shape: Sequence[int]) -> OfBatch | Choice:
    def place(old: Place) -> Place:
        sample, position = old
        return (None if sample is not None and sample not in dims and shape[sample] == 1 else sample), position

    def atom(old: Atom) -> Atom:
        if isinstance(old, Seen):
            return replace(old, place=place(old.place))
        if isinstance(old, Apart):
            return replace(old, first=place(old.first), second=place(old.second))
        return replace(old, places=frozenset(map(place, old.places))) if isinstance(old, Equal) else old

    if isinstance(value, OfBatch):
        return replace(value, place=place(value.place))
    return replace(value, condition=frozenset(frozenset(map(atom, every)) for every in value.condition))


def either(first: Condition, second: Condition) -> Condition:
    """Where one of two conditions holds."""
    return simpler(first | second)


def sum_of(first: Linear, second: Linear, factor: int) -> Linear:
    """The first value, and the second times a factor."""
    steps = tuple(a + factor * b for a, b in zip(first.steps, second.steps, strict=True))
    return Linear(steps, first.number + factor * second.number)


def zero_where_it_holds(choice: Choice) -> Choice:
    """The same choice; if one of its numbers is 0, it is the number where the condition holds."""
    if choice.yes == 0 or choice.no != 0:
        return choice
    return replace(choice, condition=opposite(choice.condition), yes=choice.no, no=choice.yes)


def number_of(value: object) -> Number | None:
    """The one number that a value is everywhere."""
    choice = as_choice(value) if isinstance(value, Formula) else None
    if choice is None or (choice.yes != choice.no and choice.condition not in (ALWAYS, NEVER)):
        return None
    return choice.no if choice.condition == NEVER else choice.yes
