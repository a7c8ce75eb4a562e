"""Remarks on imported settings: first those without a price, then those priced differently."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hardware_profiles.foreign import printable

if TYPE_CHECKING:
    from planner.report.console import PlainConsole


@dataclass(frozen=True, slots=True, kw_only=True)
class Remarks:
    """What a plan of imported settings does not have.

    Attributes:
        unmodelled: settings that matter but have no price.
        notes: on settings that are priced differently than the file has them.
        unread: names of settings that are not part of a plan.
    """

    unmodelled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


def print_unmodelled(console: "PlainConsole", remarks: Remarks) -> None:
    """Print a line per setting that matters and has no price, before anything else."""
    for line in remarks.unmodelled:
        console.print(f"Not in the price: {printable(line)}", soft_wrap=True)
    if remarks.unmodelled:
        console.print()


def print_remarks(console: "PlainConsole", remarks: Remarks, verbose: bool) -> None:
    """Print notes, and how many settings are not part of a plan; their names with `verbose`."""
    for note in remarks.notes:
        console.print(f"\n{printable(note)}", soft_wrap=True)
    if not remarks.unread:
        return
    count = f"{len(remarks.unread)} settings are no part of a plan"
    if len(remarks.unread) == 1:
        count = "1 setting is no part of a plan"
    names = f": {', '.join(remarks.unread)}" if verbose else "; --verbose lists them"
    console.print(printable(f"\n{count}{names}", "\n"), soft_wrap=True)
