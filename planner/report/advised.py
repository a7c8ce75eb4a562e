"""Prints the advice on a configuration."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.report.table import table_of
from planner.report.units import bytes_text, percent_text, seconds_text

if TYPE_CHECKING:
    from planner.plan.binding.bind import BoundPlan
    from planner.plan.plan import Prediction
    from planner.report.console import PlainConsole

Row = tuple[str, str, str, float, "Prediction"]
"""A change: its name, current and better value, the seconds it saves, and the prediction after it."""


def print_advice(
    console: "PlainConsole",
    engine: str,
    now: "BoundPlan",
    best: "BoundPlan | None",
    changes: Sequence[Row],
    proof: str = "",
) -> None:
    """Print the cost of the configuration, the best plan of its engine with its proof, and a row per change, priced
    with the changes above it."""
    plan, figures = now.plan, now.plan.prediction
    length = plan.model.sequence_length
    console.print(
        f"{plan.model.reference} with {engine} on {plan.cluster.devices} x {plan.cluster.machine}: a step of"
        f" {plan.training.global_batch} samples{f' of {length} tokens' if length else ''} takes"
        f" {seconds_text(figures.step_seconds)} and {_memory(figures)}",
        soft_wrap=True,
    )
    if best is None:
        fits = figures.peak_bytes <= figures.capacity_bytes
        said = "Nothing faster was found for this engine" if fits else "Nothing was found for this engine that fits"
        console.print(said, soft_wrap=True)
        return
    there = best.plan.prediction
    share = 1 - there.step_seconds / figures.step_seconds
    console.print(
        f"The best that was found for it takes {seconds_text(there.step_seconds)} ({percent_text(abs(share))}"
        f" {'less' if share >= 0 else 'more'}) and {_memory(there)}",
        soft_wrap=True,
    )
    if proof:
        console.print(proof, soft_wrap=True)
    table = table_of("\nChanges, cheapest to make first", "what", "now", "better", "saves", "step after it", "memory")
    for column in table.columns[3:]:
        column.justify = "right"
    for what, here, other, seconds, after in changes:
        saved = seconds_text(seconds)
        table.add_row(what, here, other, saved, seconds_text(after.step_seconds), bytes_text(after.peak_bytes))
    console.print(table)


def _memory(figures: "Prediction") -> str:
    """`57.5 GiB of 79.1 GiB per device`, and whether it fits."""
    words = f"{bytes_text(figures.peak_bytes)} of {bytes_text(figures.capacity_bytes)} per device"
    return words if figures.peak_bytes <= figures.capacity_bytes else f"{words}: it does not fit"
