"""Interleaved micro-batches: copies of a pass take turns, so that one computes while another communicates.

    computation     0 1 0 1 0   1 ..       each copy computes until it sends, then the next goes on
    communication     0 1 0 1 0   1        collectives run one after the other

The order is fixed, copy by copy and slot by slot; the runtime executes the same order. A copy goes on when its
collective is done and the copies before it in the round have had their turn. A pass yields where it sends something
itself. So the collective of one copy also overlaps all that the other computes until it sends:

    forward    0 .. row-parallel product | 1 .. row-parallel product | 0 add, norm, column- and row-parallel product ..
                                    [sum of 0 ...............]  [sum of 1 ..................]

With sequence parallelism a copy sends twice with almost no work in between, which would hide nothing. So it does this
work in the middle of a turn of another copy, and both of its collectives overlap products:

    forward    1 .. attention | 0 add, norm | 1 row-parallel product | 0 up | 1 add, norm | 0 down | ..
           [scatter of 0]      [gather of 0 ..............]  [scatter of 1]   [gather of 1]

The backward pass goes through the turns of the forward pass from the last to the first, as autograd does.

The idea is that of interleaved parts of a batch: MindSpore's fine-grained multi-copy parallelism; Wang et al. 2024,
"Domino" (arXiv 2409.15241). Not good for: communication that takes cores from computation.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from costmodels.errors import CostModelError
from costmodels.units import Seconds

Then: TypeAlias = Literal["work", "brief", "pause"]
"""How a copy goes on after it has yielded: with work; with something brief that ends with a collective and runs in a
pause of another copy; or with work, after such a pause."""


class Slot(NamedTuple):
    """Seconds that a copy computes before it yields, seconds of the collective that it then starts (0: none), and how
    the copy goes on forward after that."""

    computed: Seconds
    sent: Seconds
    then: Then = "work"


class Part(NamedTuple):
    """An operator of a pass.

    Attributes:
        sent: seconds of the collective before the operator, in the forward pass; 0 if the copy yields without a
            collective here (a weight that moves in the other pass only); None if it does not yield.
        computed: seconds of computation.
        then: how a copy goes on with the operator; it also yields before a "pause".
    """

    sent: Seconds | None
    computed: Seconds
    then: Then = "work"

    @property
    def yields(self) -> bool:
        """Whether the copy yields before the operator."""
        return self.sent is not None or self.then == "pause"


def slots_of(parts: Iterable[Part]) -> list[Slot]:
    """The slots of a forward pass: a slot ends wherever the copy yields."""
    slots: list[Slot] = []
    computed = 0.0
    for part in parts:
        if part.yields:
            slots.append(Slot(computed, part.sent or 0.0, part.then))
            computed = 0.0
        computed += part.computed
    return [*slots, Slot(computed, 0.0)]


def backward_slots_of(parts: Sequence[Part]) -> list[Slot]:
    """As `slots_of` for the backward pass: operators in reverse order, and each computes before it sends."""
    slots: list[Slot] = []
    computed = 0.0
    for part in reversed(parts):
        computed += part.computed
        if part.yields:
            slots.append(Slot(computed, part.sent or 0.0, part.then))
            computed = 0.0
    return [*slots, Slot(computed, 0.0)]


def take_turns(copies: Sequence[Iterator[Then]], begin: Callable[[int], None] = lambda copy: None) -> None:
    """Run copies to their ends in the given order, each until it yields.

    In a pause of one copy, the others do their brief parts. `copies` yield how they go on; `begin` is called with the
    number of each copy whose turn begins.
    """
    left: dict[int, Then] = dict.fromkeys(range(len(copies)), "work")

    def go_on(copy: int) -> bool:
        """Whether it pauses."""
        then = next(copies[copy], None)
        if then is None:
            del left[copy]
            return False
        left[copy] = then
        return then == "pause"

    while left:
        for copy in [*left]:
            if copy not in left:
                continue
            begin(copy)
            while go_on(copy):
                for other in [one for one, then in left.items() if then == "brief"]:
                    begin(other)
                    go_on(other)


def turns_of(thens: Sequence[Then], copies: int, *, backward: bool = False) -> list[int]:
    """The numbers of the copies in the order of their turns.

    Each copy goes on as `thens` says after each turn but its last. The turns of a `backward` pass are those of the
    forward pass, with `thens` reversed, from the last to the first.
    """
    found: list[int] = []

    def copy(number: int) -> Iterator[Then]:
        for then in (*thens[::-1], None) if backward else (*thens, None):
            found.append(number)
            if then is not None:
                yield then

    take_turns([copy(number) for number in range(copies)])
    return found[::-1] if backward else found


def paired_time(one: Sequence[Slot], other: Sequence[Slot]) -> Seconds:
    """Seconds until two passes that take turns are both done; `one` begins.

    Each goes on until it sends something; when one is done, the other goes on alone.
    """
    slots, at, there = (one, other), [0, 0], [0.0, 0.0]
    computing = sending = 0.0
    turn = 0
    while at[0] < len(one) or at[1] < len(other):
        if at[turn] < len(slots[turn]):
            computation, sent, _ = slots[turn][at[turn]]
            at[turn] += 1
            computing = there[turn] = max(computing, there[turn]) + computation
            if sent > 0.0:
                sending = there[turn] = max(sending, computing) + sent
        turn = 1 - turn
    return max(computing, *there)


def interleaved_time(slots: Sequence[Slot], copies: int, *, backward: bool = False) -> Seconds:
    """Seconds until all copies have passed through their slots, forward or `backward`; the plain sum for one copy.

    Raises CostModelError for less than one copy.
    """
    if copies < 1:
        raise CostModelError(f"a turn takes at least one copy, got {copies}")
    computing = sending = 0.0  # when the computation and the communication stream are free
    there = [0.0] * copies  # when the last work or collective of each copy is done
    left = [iter(slots) for _ in range(copies)]
    for copy in turns_of([slot.then for slot in slots[:-1]], copies, backward=backward):
        computation, sent, _ = next(left[copy])
        computing = there[copy] = max(computing, there[copy]) + computation
        if sent > 0.0:
            sending = there[copy] = max(sending, computing) + sent
    return max(computing, *there)
