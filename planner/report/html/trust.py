"""The interval of the prediction and its basis."""

from planner.report.data.trust import Trust
from planner.report.html.figure import SECONDS, Figure, Table, layout
from planner.report.units import percent_text, seconds_text


def interval_figure(trust: Trust) -> Figure | None:
    """The prediction in its interval; None if the plan has none."""
    if trust.low_seconds is None or trust.high_seconds is None:
        return None
    low, high, step = trust.low_seconds, trust.high_seconds, trust.step_seconds
    return Figure(
        key="interval",
        title="Interval",
        label=f"{seconds_text(step)} predicted; four of five measured steps between {seconds_text(low)} and"
        f" {seconds_text(high)}.",
        caption=rests_on(trust),
        spec={
            "data": [
                {
                    "type": "scatter",
                    "mode": "markers",
                    "x": [step],
                    "y": ["step"],
                    "name": "predicted",
                    "marker": {"color": "@forward", "size": 14},
                    "error_x": {
                        "type": "data",
                        "symmetric": False,
                        "array": [high - step],
                        "arrayminus": [step - low],
                        "color": "@forward",
                        "thickness": 3,
                        "width": 10,
                    },
                    "hovertext": [f"{seconds_text(step)}, {seconds_text(low)} to {seconds_text(high)}"],
                    "hoverinfo": "text",
                }
            ],
            "layout": layout(
                xaxis={"range": [0, 1.1 * high], "fixedrange": True, **SECONDS},
                yaxis={"visible": False, "fixedrange": True},
            ),
        },
        table=Table(
            caption="Interval of the prediction",
            columns=("what", "value"),
            rows=(
                ("predicted", seconds_text(step)),
                ("low end", seconds_text(low)),
                ("high end", seconds_text(high)),
                ("holds for", f"{percent_text(trust.coverage)} of runs"),
            ),
        ),
        height=130,
    )


def rests_on(trust: Trust) -> str:
    """The runs behind the interval."""
    models = "models with experts" if trust.experts else "models without experts"
    if trust.runs:
        return f"From the errors of {trust.runs} published runs, predicted before anybody looked at their results."
    return (
        f"Too few runs of {models} on machines like {trust.profile} are published: this is the interval of all other"
        " runs, twice as wide."
    )


def measured_text(trust: Trust) -> str:
    """The errors of whole steps that were measured on the profile."""
    one = trust.measured
    if one is None or one.mean_absolute is None or one.bias is None:
        return f"No measured training runs are recorded for {trust.profile}."
    return (
        f"{one.timed} measured runs on {trust.profile} are predicted {percent_text(one.mean_absolute)} off in the mean"
        f" (bias {one.bias * 100:+.1f}%; recorded on {one.date})."
    )


def facts_text(trust: Trust) -> str:
    """The sources of the profile's numbers."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in trust.facts)
    changed = "" if trust.digest_as_planned else " They have changed since the plan was made."
    return f"The profile has {sum(count for _, count in trust.facts)} numbers: {kinds}.{changed}"


def fits_table(trust: Trust) -> Table | None:
    """The errors of kernels and collectives; None if nothing is recorded."""
    if not trust.fits:
        return None
    return Table(
        caption="What the profile was calibrated on",
        columns=("part", "measured rows", "mean error", "bias", "recorded"),
        rows=tuple(
            (one.part, str(one.rows), percent_text(one.mean_absolute), f"{one.bias * 100:+.1f}%", one.date)
            for one in trust.fits
        ),
    )
