"""What is refused about a request or a plan: one record, for those who find it and those who raise it.

Fault(option="interleave", value="3", reason="does not divide micro_batches = 4", hint="the nearest ...")

a request      interleave = 3 does not divide micro_batches = 4; the nearest ...
a plan file    training.interleave: 3 does not divide micro_batches = 4; the nearest ...
a command      --interleave: 3 does not divide micro_batches = 4; the nearest ...
"""

from collections.abc import Callable
from dataclasses import dataclass

from planner.errors import PlannerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why something cannot be had.

    Attributes:
        option: the field whose value it is; empty where the reason says what it is about.
        value: what the field says; empty where the reason says it.
        reason: what clashes, in words that go on from the value.
        hint: what to do; may be empty.
        numbers: options of which another number may help, while all others stay as they are.
    """

    reason: str
    option: str = ""
    value: str = ""
    hint: str = ""
    numbers: tuple[str, ...] = ()

    def __str__(self) -> str:
        """`value reason; hint`: all but the option, for which every reader has a name of its own."""
        apart = " " if self.value and not self.reason.startswith((":", ",")) else ""
        return f"{self.value}{apart}{self.reason}{'; ' * bool(self.hint)}{self.hint}"


def named(option: str) -> str:
    """`gathers:`, as most refusals begin."""
    return f"{option}:"


def assigned(option: str) -> str:
    """`pipeline =`, as refusals of numbers in requests begin."""
    return f"{option} ="


def said(fault: Fault, lead: Callable[[str], str] = named) -> str:
    """The whole text of a fault, behind `lead` of its option."""
    return f"{lead(fault.option)} {fault}" if fault.option else str(fault)


def refuse(fault: Fault | None, kind: type[PlannerError], lead: Callable[[str], str] = named) -> None:
    """Raise an error of this kind where there is a fault."""
    if fault is not None:
        raise kind(said(fault, lead))
