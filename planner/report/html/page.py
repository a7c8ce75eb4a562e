"""The page: one file with everything in it, which can be mailed, opened from a disk and archived.

    template (page.html.j2)  <- style.css, *.js, figures as JSON, tables as HTML, plotly.js

plotly.js is 5 MB of text. It is at the end of the file, compressed, and so are the figures. The page first shows all
numbers in tables, and draws the figures when the browser has unpacked them. Browsers that cannot unpack them keep the
tables.
"""

import base64
import gzip
import json
from collections.abc import Mapping
from importlib import resources

from planner.plan.plan import PLANNER_VERSION
from planner.report.data.report import Report
from planner.report.html.choices import baselines_text, choices_figure, reasons_table
from planner.report.html.figure import Figure
from planner.report.html.glossary import explained
from planner.report.html.hosts import hosts_view
from planner.report.html.memory import classes_figure as memory_figure
from planner.report.html.memory import curves_figure
from planner.report.html.model import model_view
from planner.report.html.network import group_views
from planner.report.html.spending import classes_figure, crossings_figure, parts_figure
from planner.report.html.timeline import timeline_figure
from planner.report.html.trust import facts_text, fits_table, interval_figure, measured_text
from planner.report.rows import tiles_of

_SCRIPTS = ("figures.js", "timeline.js", "page.js")


def page(report: Report) -> str:
    """The page of a report, as the text of an HTML file."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("planner.report.html", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["explained"] = explained
    figures = _figures(report)
    return environment.get_template("page.html.j2").render(
        report=report,
        figures=figures,
        tiles=tiles_of(report.figures),
        shape=model_view(report.shape),
        groups=group_views(report.network),
        hosts=hosts_view(report.hosts),
        reasons=None if report.choices is None else reasons_table(report.choices),
        baselines="" if report.choices is None else baselines_text(report.choices),
        trust_texts=[measured_text(report.trust), facts_text(report.trust)],
        fits=fits_table(report.trust),
        style=_asset("style.css"),
        scripts="\n".join(_asset(name) for name in _SCRIPTS),
        specs=_packed(_specs(figures)),
        plotly=_packed(_plotly()),
        version=PLANNER_VERSION,
    )


def _figures(report: Report) -> dict[str, Figure]:
    """Every figure by its key."""
    found = [
        timeline_figure(report.lanes, report.prediction, report.shape.slices),
        memory_figure(report.memory),
        curves_figure(report.memory),
        parts_figure(report.spending),
        classes_figure(report.spending),
    ]
    if report.network.crossings:
        found.append(crossings_figure(report.network))
    if report.choices is not None:
        found.append(choices_figure(report.choices))
    interval = interval_figure(report.trust)
    return {one.key: one for one in (*found, *(() if interval is None else (interval,)))}


def _specs(figures: Mapping[str, Figure]) -> str:
    """The data for the scripts, as JSON."""
    content = {one.key: {"spec": one.spec, "by": one.interactive} for one in figures.values()}
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def _asset(name: str) -> str:
    return resources.files("planner.report.html").joinpath("assets", name).read_text(encoding="utf-8")


def _packed(text: str) -> str:
    """Compressed text in characters that are safe in any script: nothing in it ends the script."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())
