"""The comparison of two plans, for people."""

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table

from planner.plan.compare.contrasts import Difference
from planner.plan.compare.differences import Comparison, Step
from planner.plan.plan import Plan
from planner.report.console import styled
from planner.report.table import table_of
from planner.report.units import bytes_text, percent_text, seconds_text


def comparison_report(names: tuple[str, str], found: Comparison) -> RenderableType:
    """Both plans, the cost of each difference, and the total."""
    title = styled(("\nWhat each difference costs, one after the other", "bold"))
    return Group(_plans(names, found), title, _steps(found), *_remarks(found))


def _plans(names: tuple[str, str], found: Comparison) -> Table:
    table = table_of("\nThe plans", "", "step time", "peak memory", "on")
    table.columns[1].justify = table.columns[2].justify = "right"
    for name, bound in zip(names, (found.first, found.second), strict=True):
        plan = bound.plan
        table.add_row(name, *_figures(plan), f"{plan.cluster.devices} x {plan.cluster.machine}")
    return table


def _figures(plan: Plan) -> tuple[str, str]:
    return seconds_text(plan.prediction.step_seconds), bytes_text(plan.prediction.peak_bytes)


def _steps(found: Comparison) -> Table:
    table = table_of("", "", "from", "to", "step time", "peak memory", "")
    table.columns[3].justify = table.columns[4].justify = "right"
    for step in found.steps:
        first, *others = step.differences
        table.add_row(*_words(first), signed_seconds(step.seconds), signed_bytes(step.nbytes), _fate(step))
        for other in others:
            table.add_row(*_words(other), "together", "with that", "")
    share = found.seconds / found.first.plan.prediction.step_seconds
    more = f"{percent_text(abs(share))} {'more' if share > 0 else 'less'}" if share else ""
    whole = signed_seconds(found.seconds), signed_bytes(found.nbytes)
    table.add_row(styled(("all", "bold")), "", "", *whole, more)
    return table


def _words(difference: Difference) -> tuple[str, str, str]:
    return difference.name, difference.here, difference.there


def _fate(step: Step) -> str:
    return "" if step.fits else "does not fit yet"


def _remarks(found: Comparison) -> tuple[str, ...]:
    if not found.steps:
        return ("\nThe plans decide the same.",)
    if any(len(step.differences) > 1 for step in found.steps):
        return ("\nDifferences that are only legal together are priced together.",)
    return ()


def signed_seconds(seconds: float) -> str:
    """+1.2 s, -31 ms, 0."""
    return _signed(seconds, seconds_text)


def signed_bytes(nbytes: float) -> str:
    """+1.2 GiB, -3.1 MiB, 0."""
    return _signed(nbytes, bytes_text)


def _signed(value: float, text: Callable[[float], str]) -> str:
    return f"{'+' if value > 0 else '-'}{text(abs(value))}" if value else "0"
