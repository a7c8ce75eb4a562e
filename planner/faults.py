"""A fault of a request or a plan: one record, shared by the code that finds it and the code that raises it.

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
    """Why a request or a plan is refused.

    Attributes:
        option: the field with the value; empty if the reason names it.
        value: the value of the field; empty if the reason has it.
        reason: what clashes; the text continues after the value.
        hint: what to do; may be empty.
        numbers: options for which another number may help, with all others unchanged.
    """

    reason: str
    option: str = ""
    value: str = ""
    hint: str = ""
    numbers: tuple[str, ...] = ()

    def __str__(self) -> str:
        """`value reason; hint`: the text without the option, for which each reader has its own name."""
        apart = " " if self.value and not self.reason.startswith((":", ",")) else ""
        return f"{self.value}{apart}{self.reason}{'; ' * bool(self.hint)}{self.hint}"


def named(option: str) -> str:
    """`gathers:`, the usual start of a refusal."""
    return f"{option}:"


def assigned(option: str) -> str:
    """`pipeline =`, the start of refusals of numbers in requests."""
    return f"{option} ="


def said(fault: Fault, lead: Callable[[str], str] = named) -> str:
    """The whole text of a fault, after `lead` of its option."""
    return f"{lead(fault.option)} {fault}" if fault.option else str(fault)


def refuse(fault: Fault | None, kind: type[PlannerError], lead: Callable[[str], str] = named) -> None:
    """Raise an error of this kind if there is a fault."""
    if fault is not None:
        raise kind(said(fault, lead))
