"""All collectives of a step: what a plan is charged for, and what an audit compares.

A charge has the part of the time to which its seconds belong, the phase, and the sender: an operator, or nobody if a
pass over all parameters or a pipeline stage sends it.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Literal, NamedTuple

from planner.pricing.message import Message

Phase = Literal["forward", "recomputation", "backward", "update"]
PHASES: tuple[Phase, ...] = ("forward", "recomputation", "backward", "update")
"""Three passes over every micro-batch, and the end of the step."""

UNCHARGED = "not charged"
"""Messages that are listed without a price: the loss, which is made the same on every rank to be shown, and integer
inputs that are loaded in the layout of their first reader only."""


A_BLOCK = "(weights of a block)"
"""The sender of coalesced all-gathers of weights, and of the reductions of their gradients."""


class Charge(NamedTuple):
    """A message, the part of the time in which it is charged, its phase, and the operator that sends it ("" for
    none)."""

    part: str
    phase: Phase
    owner: str
    message: Message


Charges = Counter[Charge]
Times = Mapping[Phase, int]
"""How often something happens in each phase."""


def charge(charges: Charges, part: str, owner: str, message: Message, times: Times) -> None:
    """Add a message, a number of times in each phase."""
    for phase, number in times.items():
        if number:
            charges[Charge(part, phase, owner, message)] += number
