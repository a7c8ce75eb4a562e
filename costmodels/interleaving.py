"""Copies of a pass that take turns, so that one computes while what another has sent is on its way.

    computation     0 1 0 1 0   1 ..       each copy computes until it sends, then the next goes on
    communication     0 1 0 1 0   1        what is sent goes one after the other

The order is fixed, copy by copy and slot by slot, and it is that in which the runtime executes. A copy goes on when
what it has sent is there and the copies before it in the round have had their turn. Each pass takes its turns where it
sends something itself, so that what one copy sends is under all that the other computes until it sends, too:

    forward    0 .. row-parallel product | 1 .. row-parallel product | 0 add, norm, column- and row-parallel product ..
                                    [sum of 0 ...............]  [sum of 1 ..................]

With sequence parallelism a copy sends twice with next to nothing in between, which would cover nothing. So it does that
in the middle of what another one computes, and both of its messages are under products:

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
"""How a copy that lets others go on will go on itself: with work; with something brief that ends with a message, which
others let it do in a pause of theirs; or with work, after such a pause."""


class Slot(NamedTuple):
    """What a copy computes before it lets others go on, how long what it sends then is on its way, 0 where nothing is,
    and how it goes on forward from there."""

    computed: Seconds
    sent: Seconds
    then: Then = "work"


class Part(NamedTuple):
    """An operator of a pass. `sent`: how long what it sends before it computes is on its way, forward; 0 where it lets
    others go on and sends nothing, as a weight moves in the other pass alone; None where it does not. `then` is how a
    copy goes on with it, which lets others go on before a "pause", too."""

    sent: Seconds | None
    computed: Seconds
    then: Then = "work"

    @property
    def yields(self) -> bool:
        """Whether others go on before it."""
        return self.sent is not None or self.then == "pause"


def slots_of(parts: Iterable[Part]) -> list[Slot]:
    """The slots of a pass: one closes wherever others go on."""
    slots: list[Slot] = []
    computed = 0.0
    for part in parts:
        if part.yields:
            slots.append(Slot(computed, part.sent or 0.0, part.then))
            computed = 0.0
        computed += part.computed
    return [*slots, Slot(computed, 0.0)]


def backward_slots_of(parts: Sequence[Part]) -> list[Slot]:
    """As `slots_of` for the backward pass, which goes through the operators in the reverse order, and in each computes
    before it sends."""
    slots: list[Slot] = []
    computed = 0.0
    for part in reversed(parts):
        computed += part.computed
        if part.yields:
            slots.append(Slot(computed, part.sent or 0.0, part.then))
            computed = 0.0
    return [*slots, Slot(computed, 0.0)]


def take_turns(copies: Sequence[Iterator[Then]], begin: Callable[[int], None] = lambda copy: None) -> None:
    """Run copies to their ends, each until it says how it goes on, in the order in which they are given. In a pause of
    one the others do what is brief. `begin` is told whose turn begins."""
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
    """Whose turn it is, one after the other, where copies go on as said behind each of their turns but the last. The
    turns of a `backward` pass are those of the forward pass with these from the last to the first."""
    found: list[int] = []

    def copy(number: int) -> Iterator[Then]:
        for then in (*thens[::-1], None) if backward else (*thens, None):
            found.append(number)
            if then is not None:
                yield then

    take_turns([copy(number) for number in range(copies)])
    return found[::-1] if backward else found


def paired_time(one: Sequence[Slot], other: Sequence[Slot]) -> Seconds:
    """Seconds until two passes are through that take turns, of which `one` begins: each goes on until it has sent
    something, and alone when the other is through."""
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
    """Seconds until all copies are through their slots, of a forward or `backward` pass; the plain sum for one copy.

    Raises CostModelError for less than one copy.
    """
    if copies < 1:
        raise CostModelError(f"a turn takes at least one copy, got {copies}")
    computing = sending = 0.0  # when each of the two is free
    there = [0.0] * copies  # when what each copy has sent is there
    left = [iter(slots) for _ in range(copies)]
    for copy in turns_of([slot.then for slot in slots[:-1]], copies, backward=backward):
        computation, sent, _ = next(left[copy])
        computing = there[copy] = max(computing, there[copy]) + computation
        if sent > 0.0:
            sending = there[copy] = max(sending, computing) + sent
    return max(computing, *there)
