"""The plan among other plans: time against memory."""

import math

from hardware_profiles.units import GIB
from planner.plan.words import telling
from planner.report.data.choices import Choice, Choices
from planner.report.html.figure import SECONDS, Figure, Spec, Table, layout
from planner.report.units import bytes_text, percent_text, seconds_text


def choices_figure(choices: Choices) -> Figure:
    """Points of the front, and this plan."""
    words = [dict(plan.words) for plan in choices.plans]
    names = telling(words) if words else ()
    fastest = choices.plans[0].step_seconds
    series = _series(choices)
    return Figure(
        key="choices",
        title="Time against memory",
        label=f"{len(choices.plans)} plans, step time against peak memory. The table below lists them.",
        caption=choices.note,
        spec={
            "data": [
                _front(choices),
                *(_points(name, plans, names, *look) for name, plans, look in series),
            ],
            "layout": layout(x="GiB per device", y="step time", hovermode="closest", yaxis=SECONDS),
        },
        table=Table(
            caption="The plans",
            columns=("plan", "step time", "slower by", "peak memory", *names),
            rows=tuple(
                (
                    " ".join(
                        filter(None, ("this plan" if plan.this else str(number), f"({plan.name})" if plan.name else ""))
                    ),
                    seconds_text(plan.step_seconds),
                    percent_text(plan.step_seconds / fastest - 1) if number > 1 else "",
                    bytes_text(plan.peak_bytes),
                    *(row[name] for name in names),
                )
                for number, (plan, row) in enumerate(zip(choices.plans, words, strict=True), start=1)
            ),
        ),
        height=340,
        legend=tuple((look[0], name) for name, _, look in series),
    )


def reasons_table(choices: Choices) -> Table | None:
    """The cost of changing a decision of this plan; None if nothing is known."""
    own = next(plan for plan in choices.plans if plan.this)
    rows = []
    for one in choices.reasons:
        if one.step_seconds is None:
            cost = ("does not fit", "")
        else:
            more = one.step_seconds / own.step_seconds - 1
            cost = (seconds_text(one.step_seconds), f"{'+' if more >= 0 else '-'}{percent_text(abs(more))}")
        rows.append((one.decision, one.here, one.instead, *cost))
    columns = ("decision", "this plan", "best alternative", "step time", "change")
    return Table(caption="Cost of other decisions", columns=columns, rows=tuple(rows), texts=3) if rows else None


def baselines_text(choices: Choices) -> str:
    """The conventional plans compared with this one, a sentence each."""
    own = next(plan for plan in choices.plans if plan.this)
    found = []
    for plan in choices.plans:
        more = plan.step_seconds / own.step_seconds - 1
        if plan.name and plan.this:
            found.append(f"This plan is a conventional one: {plan.name}.")
        elif plan.name:
            change = f"{percent_text(abs(more))} {'slower' if more >= 0 else 'faster'} than this plan"
            found.append(f"Conventional, {plan.name}: {seconds_text(plan.step_seconds)}, {change}.")
    return " ".join(found)


def _series(choices: Choices) -> list[tuple[str, list[Choice], tuple[str, int, str]]]:
    """Plans by their source, with colour, size and symbol of their points; only sources with plans."""
    plans = choices.plans
    found = [
        ("other plans", [plan for plan in plans if not plan.this and not plan.name], ("@forward", 9, "circle")),
        ("conventional plans", [plan for plan in plans if plan.name and not plan.this], ("@optimizer", 11, "square")),
        ("this plan", [plan for plan in plans if plan.this], ("@limit", 14, "diamond")),
    ]
    return [one for one in found if one[1]]


def _front(choices: Choices) -> Spec:
    """The Pareto front: plans than which none is both faster and leaner."""
    best = math.inf
    front = []
    for plan in choices.plans:  # the fastest first
        if plan.peak_bytes < best:
            best = plan.peak_bytes
            front.append(plan)
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [plan.peak_bytes / GIB for plan in front],
        "y": [plan.step_seconds for plan in front],
        "hoverinfo": "skip",
        "line": {"color": "@line", "dash": "dot", "width": 1.5},
    }


def _points(name: str, plans: list[Choice], names: tuple[str, ...], colour: str, size: int, symbol: str) -> Spec:
    texts = []
    for plan in plans:
        told = "<br>".join(f"{word}: {dict(plan.words)[word]}" for word in names)
        told = f"{plan.name}<br>{told}" if plan.name else told
        texts.append(f"{seconds_text(plan.step_seconds)}, {bytes_text(plan.peak_bytes)}<br>{told}")
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [plan.peak_bytes / GIB for plan in plans],
        "y": [plan.step_seconds for plan in plans],
        "hovertext": texts,
        "hoverinfo": "text",
        "marker": {"color": colour, "size": size, "symbol": symbol},
    }
