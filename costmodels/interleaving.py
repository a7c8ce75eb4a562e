"""Copies of a pass that take turns, so that one computes while what another has sent is on its way.

    computation     0 1 0 1 0   1 ..       each copy computes until it sends, then the next goes on
    communication     0 1 0 1 0   1        what is sent goes one after the other

The order is fixed, copy by copy and slot by slot, and it is that in which the runtime executes. A copy goes on when
what it has sent is there and the copies before it in the round have had their turn. Each pass takes its turns where it
sends something itself, so that what one copy sends is under all that the other computes until it sends, too:

    forward    0 .. row-parallel product | 1 .. row-parallel product | 0 add, norm, column- and row-parallel product ..
                                    [sum of 0 ...............]  [sum of 1 ..................]

The idea is that of interleaved parts of a batch: MindSpore's fine-grained multi-copy parallelism; Wang et al. 2024,
"Domino" (arXiv 2409.15241). Not good for: communication that takes cores from computation.
"""

from collections.abc import Iterable, Sequence

from costmodels.errors import CostModelError
from costmodels.units import Seconds

Slot = tuple[Seconds, Seconds]
"""What a copy computes before it sends, and how long that is on its way; 0 where nothing is sent."""


Sent = Seconds | None
"""How long what an operator sends is on its way; 0 where it lets others go on and sends nothing, as a weight moves in
the other pass alone; None where it does not."""


def slots_of(operators: Iterable[tuple[Sent, Seconds]]) -> list[Slot]:
    """The slots of a pass from what each of its operators sends before it computes (first) and computes: one closes
    wherever others go on."""
    slots: list[Slot] = []
    computed = 0.0
    for sent, computation in operators:
        if sent is not None:
            slots.append((computed, sent))
            computed = 0.0
        computed += computation
    return [*slots, (computed, 0.0)]


def backward_slots_of(operators: Sequence[tuple[Sent, Seconds]]) -> list[Slot]:
    """As `slots_of` for the backward pass, which goes through the operators in the reverse order, and in each computes
    before it sends."""
    slots: list[Slot] = []
    computed = 0.0
    for sent, computation in reversed(operators):
        computed += computation
        if sent is not None:
            slots.append((computed, sent))
            computed = 0.0
    return [*slots, (computed, 0.0)]


def paired_time(one: Sequence[Slot], other: Sequence[Slot]) -> Seconds:
    """Seconds until two passes are through that take turns, of which `one` begins: each goes on until it has sent
    something, and alone when the other is through."""
    slots, at, there = (one, other), [0, 0], [0.0, 0.0]
    computing = sending = 0.0
    turn = 0
    while at[0] < len(one) or at[1] < len(other):
        if at[turn] < len(slots[turn]):
            computation, sent = slots[turn][at[turn]]
            at[turn] += 1
            computing = there[turn] = max(computing, there[turn]) + computation
            if sent > 0.0:
                sending = there[turn] = max(sending, computing) + sent
        turn = 1 - turn
    return max(computing, *there)


def interleaved_time(slots: Sequence[Slot], copies: int) -> Seconds:
    """Seconds until all copies are through their slots; the plain sum for one copy.

    Raises CostModelError for less than one copy.
    """
    if copies < 1:
        raise CostModelError(f"a turn takes at least one copy, got {copies}")
    computing = sending = 0.0  # when each of the two is free
    there = [0.0] * copies  # when what each copy has sent is there
    for computation, sent in slots:
        for copy in range(copies):
            computing = max(computing, there[copy]) + computation
            there[copy] = computing
            if sent > 0.0:
                sending = there[copy] = max(sending, computing) + sent
    return max(computing, *there)
