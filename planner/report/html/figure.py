"""Figures of the page: the plotly spec, and the same data as a table.

Colours are words that begin with @; the page looks them up for the current theme (`assets/style.css`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]  # JSON of a figure, as plotly.js takes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Columns (all after the first `texts` hold numbers) and rows of cells in words."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure called `key`: a sentence that describes it for those who cannot see it, the spec, its colours with
    names, and the table. If `interactive` names a script, that script draws it from the spec."""

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
    """The layout that all figures share, with axis titles."""
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
        "showlegend": False,  # the page has its own legend, which wraps
        **more,
    }


SECONDS: Spec = {"tickformat": "~s", "ticksuffix": "s"}
"""An axis of seconds: 20s, 500µs."""


def bars(
    name: str, labels: Sequence[str], values: Sequence[float], texts: Sequence[str], colour: str | Sequence[str]
) -> Spec:
    """Horizontal bars, one per label, with the hover texts."""
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
