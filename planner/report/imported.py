"""What is to be known of settings that were read: first what no price has, then what is priced otherwise."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hardware_profiles.foreign import printable

if TYPE_CHECKING:
    from planner.report.console import PlainConsole


@dataclass(frozen=True, slots=True, kw_only=True)
class Remarks:
    """Settings that no price has and that matter, what is priced otherwise than the file has it, and the names of
    settings that are no part of a plan."""

    unmodelled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


def print_unmodelled(console: "PlainConsole", remarks: Remarks) -> None:
    """A line for each setting that matters and is in no price, before anything else."""
    for line in remarks.unmodelled:
        console.print(f"Not in the price: {printable(line)}", soft_wrap=True)
    if remarks.unmodelled:
        console.print()


def print_remarks(console: "PlainConsole", remarks: Remarks, verbose: bool) -> None:
    """What is priced otherwise, and how many settings are no part of a plan; which ones where that is asked for."""
    for note in remarks.notes:
        console.print(f"\n{printable(note)}", soft_wrap=True)
    if not remarks.unread:
        return
    count = f"{len(remarks.unread)} settings are no part of a plan"
    if len(remarks.unread) == 1:
        count = "1 setting is no part of a plan"
    names = f": {', '.join(remarks.unread)}" if verbose else "; --verbose lists them"
    console.print(printable(f"\n{count}{names}", "\n"), soft_wrap=True)
