"""Settings that are given up when a plan is converted for an engine that cannot express all of it."""

from collections.abc import Iterable

from rich.console import Console

from planner.report.table import table_of
from planner.report.units import bytes_text, seconds_text

Row = tuple[str, str, str, float, float]
"""A setting: its name, the plan's value, the engine's value, and the seconds of a step and bytes of a device after
that."""


def print_given_up(console: Console, rows: Iterable[Row]) -> None:
    """Print a table; each row is priced together with all rows above it."""
    table = table_of("\nGiven up", "what", "in the plan", "there", "step after it", "memory")
    for column in table.columns[3:]:
        column.justify = "right"
    for what, here, there, seconds, peak in rows:
        table.add_row(what, here, there, seconds_text(seconds), bytes_text(peak))
    console.print(table)
