"""An explanation in words."""

from rich.console import RenderableType

from hardware_profiles.units import GIB
from planner.plan.compare.explanation import Alternative, Explanation
from planner.report.table import table_of
from planner.report.units import bytes_text, percent_text, seconds_text

_MEANING = {
    "compute": "arithmetic of the model itself and of the optimizer",
    "recomputation": "time spent to save memory",
    "communication": "exposed collectives and transfers, with weight gathering and gradient reduction",
    "offload": "waiting for offloaded data",
    "pipeline bubble": "stages that wait for each other",
}


def explanation_table(found: Explanation) -> RenderableType:
    """The limits of a plan: shares of the step."""
    table = table_of("\nWhy it takes that long", "", "", "", "")
    table.show_header = False
    table.columns[1].justify = table.columns[2].justify = "right"
    for name, seconds in found.shares:
        share = percent_text(seconds / found.step_seconds)
        table.add_row(name, seconds_text(seconds), share, _MEANING[name])
    return table


def explanation_lines(found: Explanation) -> tuple[str, ...]:
    """The same in sentences."""
    lines = [f"Most of the step is {found.largest}. {memory_text(found)}"]
    if found.next_best is not None:
        lines.append(next_text(found, found.next_best))
    return tuple(lines)


def memory_text(found: Explanation) -> str:
    """Whether memory binds, how much time more memory would save, and on which rank."""
    at = f", at pipeline rank {found.slowest} of {found.ranks}" if found.ranks > 1 else ""
    if found.memory_binds:
        saved = found.memory_price * GIB
        share = percent_text(saved / found.step_seconds)
        return (
            "In this configuration memory binds: 1 GiB more per device would save about"
            f" {seconds_text(saved)} ({share}){at}."
        )
    where = f" at pipeline rank {found.fullest} of {found.ranks}" if found.ranks > 1 else ""
    free = max(0.0, found.free_bytes)
    return f"In this configuration memory does not bind: {bytes_text(free)} are free on the fullest device{where}."


def next_text(found: Explanation, other: Alternative) -> str:
    """The cost of the next best plan and its differences; or of the fastest plan, if a simpler one was preferred."""
    change = other.step_seconds / found.step_seconds - 1
    which, more = ("next best plan", "more") if change >= 0 else ("fastest plan that was found", "less")
    words = "; ".join(f"{name} {there} instead of {here}" for name, here, there in other.differences)
    return (
        f"The {which} takes {seconds_text(other.step_seconds)} ({percent_text(abs(change))} {more}), with"
        f" {words or 'the same settings'}."
    )
