"""HTML of plans, search results and comparisons for notebooks, with small figures."""

import html
from collections.abc import Callable, Iterable, Mapping, Sequence

from planner.plan.plan import Plan, Prediction
from planner.report.units import bytes_text, percent_text, seconds_text

_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
"""Paul Tol's bright colour scheme, which colour-blind people can tell apart."""


def plan_html(plan: Plan) -> str:
    """A plan: job, step time by part, memory of the fullest device."""
    found = plan.prediction
    head = (
        f"<b>{_text(plan.model.reference)}</b> on {plan.cluster.devices} x {_text(plan.cluster.machine)}:"
        f" {seconds_text(found.step_seconds)} a step, {percent_text(found.model_flops_utilisation)} of peak FLOP/s,"
        f" {bytes_text(found.peak_bytes)} of {bytes_text(found.capacity_bytes)}"
    )
    return f"<div>{head}{_bar('time', found.time, seconds_text)}{_bar('memory', found.memory, bytes_text)}</div>"


def plans_html(plans: Sequence[Plan], rows: Sequence[Mapping[str, object]], said: str) -> str:
    """The result of a search: a table of plans, the figures of the first, and the proof."""
    return f"{plan_html(plans[0])}{rows_html(rows)}<p>{_text(said)}</p>"


def comparison_html(rows: Sequence[Mapping[str, object]], first: Prediction, second: Prediction) -> str:
    """Two plans: the cost of each difference."""
    ends = f"{seconds_text(first.step_seconds)} to {seconds_text(second.step_seconds)} a step"
    return f"<div><b>{ends}</b>{rows_html(rows)}</div>"


def rows_html(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as a table with units; all text is escaped."""
    if not rows:
        return ""
    head = "".join(f"<th>{_text(str(key).replace('_', ' '))}</th>" for key in rows[0])
    cells = [[_cell(key, value) for key, value in row.items()] for row in rows]
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(key: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if key.endswith("step_seconds") or key == "difference_seconds":
            return seconds_text(value)
        if key.endswith("_bytes"):
            return f"{'-' if value < 0 else ''}{bytes_text(abs(value))}"
        return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
    return str(value)


def _bar(name: str, parts: Iterable[tuple[str, float]], said: Callable[[float], str]) -> str:
    """Parts side by side, with widths in proportion; negative parts (overlaps) are left out."""
    known = [(part, size) for part, size in parts if size > 0]
    total = sum(size for _, size in known) or 1.0
    pieces = "".join(
        f'<span title="{_text(part)} {said(size)}" style="display:inline-block;height:14px;width:{size / total:.2%};'
        f'background:{_COLOURS[at % len(_COLOURS)]}"></span>'
        for at, (part, size) in enumerate(known)
    )
    largest = ", ".join(f"{part} {said(size)}" for part, size in sorted(known, key=lambda one: -one[1])[:3])
    figure = f'<div style="font-size:0">{pieces}</div>'
    return f'<div style="max-width:40em"><small>{name}: {_text(largest)}</small>{figure}</div>'


def _text(value: object) -> str:
    return html.escape(str(value))
