"""Figures of the page: what plotly draws, and the same as a table.

Colours are words that begin with @; the page looks them up for the theme that is shown (`assets/style.css`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]  # JSON of a figure, as plotly.js takes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Columns, of which all after the first `texts` hold numbers, and rows of cells as people read them."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure called `key`: what it shows in a sentence, for those who do not see it, the spec, the colours in it with
    their names, and the table. Where `interactive` names a script, that draws it from the spec."""

    key: str
    title: str
    label: str
    caption: str
    spec: Spec
    table: Table
    height: int
    legend: tuple[tuple[str, str], ...] = ()
    interactive: str = ""


def layout(*, x: str = "", y: str = "", **more: Any) -> Spec:
    """The layout that all figures share, with titles of the axes."""
    axis = {"gridcolor": "@grid", "zerolinecolor": "@grid", "linecolor": "@line", "automargin": True}
    own_x, own_y = more.pop("xaxis", {}), more.pop("yaxis", {})
    return {
        "xaxis": {**axis, "title": {"text": x}, **own_x},
        "yaxis": {**axis, "title": {"text": y}, **own_y},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "@text", "size": 13},
        "hoverlabel": {"bgcolor": "@surface", "bordercolor": "@line", "font": {"color": "@text"}, "align": "left"},
        "margin": {"l": 10, "r": 16, "t": 8, "b": 10},
        "showlegend": False,  # the page has its own, which wraps
        **more,
    }


SECONDS: Spec = {"tickformat": "~s", "ticksuffix": "s"}
"""An axis of seconds: 20s, 500µs."""


def bars(
    name: str, labels: Sequence[str], values: Sequence[float], texts: Sequence[str], colour: str | Sequence[str]
) -> Spec:
    """Horizontal bars, one for each label, with what is said when one points at them."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": list(labels),
        "x": list(values),
        "hovertext": list(texts),
        "hoverinfo": "text",
        "marker": {"color": colour if isinstance(colour, str) else list(colour)},
    }


def names_down(count: int) -> Spec:
    """A vertical axis of names, the first on top."""
    return {
        "autorange": "reversed",
        "type": "category",
        "showgrid": False,
        "fixedrange": True,
        "dtick": 1 + count // 60,
    }
