"""What is sent in a step, message by message: what a plan is charged for, and what an audit compares.

A charge says in which part of the time its seconds stand, when it is sent, and by whom: an operator, or nobody in
particular where a pass over all parameters or a stage of a pipeline sends it.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Literal, NamedTuple

from planner.pricing.message import Message

Phase = Literal["forward", "recomputation", "backward", "update"]
PHASES: tuple[Phase, ...] = ("forward", "recomputation", "backward", "update")
"""Three passes over every micro-batch, and the end of the step."""

UNCHARGED = "not charged"
"""The part of what is listed at no price: the loss, which is made the same on every rank for people to look at, and
integers that are loaded in a layout which only the first of their readers wants."""


A_BLOCK = "(weights of a block)"
"""Who sends weights that are gathered together, and their gradients."""


class Charge(NamedTuple):
    """A message, the part of the time that it is charged in, when it is sent and for which operator ("" for none)."""

    part: str
    phase: Phase
    owner: str
    message: Message


Charges = Counter[Charge]
Times = Mapping[Phase, int]
"""How often something happens in each pass."""


def charge(charges: Charges, part: str, owner: str, message: Message, times: Times) -> None:
    """Add a message, so many times in each of the passes."""
    for phase, number in times.items():
        if number:
            charges[Charge(part, phase, owner, message)] += number
