"""The timeline of the step. The page draws its visible part: `assets/timeline.js`."""

import math
from collections.abc import Mapping, Sequence

from planner.plan.plan import Prediction, StagePrediction
from planner.report.data.lanes import Bar, Lane, Lanes
from planner.report.html.colours import STEP
from planner.report.html.figure import SECONDS, Figure, Spec, Table, layout
from planner.report.units import percent_text, seconds_text, turn_text

_WORDS = {
    "input_gradient": "backward (inputs)",
    "weight_gradient": "backward (weights)",
    "communication": "communication in passes",
    "hidden communication": "overlapped communication",
}
_TALLEST, _LEAST = 900, 16  # pixels of the figure, and of a rank


def timeline_figure(lanes: Lanes, prediction: Prediction, slices: int) -> Figure:
    """Bars of all ranks, and for each rank how it spends the step; `slices` are those of a micro-batch."""
    ranks = len(lanes.uses)
    kinds = list(dict.fromkeys(kind for kind in STEP for lane in lanes.lanes if _has(lane, kind)))
    return Figure(
        key="timeline",
        title="Pipeline timeline" if ranks > 1 else "Timeline of the step",
        label=f"Timeline of a step of {seconds_text(lanes.seconds)} on {ranks} pipeline ranks, computation and"
        " communication of each. The table below has how long each rank computes and waits.",
        caption=_caption(lanes, prediction),
        spec=_spec(lanes, kinds),
        table=_table(lanes, prediction.stages, slices),
        height=50 + max(_LEAST, min(56, _TALLEST // ranks)) * ranks,
        legend=tuple((STEP[kind], _WORDS.get(kind, kind)) for kind in kinds),
        interactive="timeline",
    )


def _has(lane: Lane, kind: str) -> bool:
    return any(bar.kind == kind for bar in lane.bars)


def _caption(lanes: Lanes, prediction: Prediction) -> str:
    text = (
        "Thick bars are computation, thin bars communication. Communication of a pass is drawn after its computation;"
        " when exactly it happens is not simulated. Drag to zoom, double-click for the whole step; on the keyboard +"
        " and - zoom, arrows move, 0 shows the whole step."
    )
    if not math.isclose(lanes.seconds, prediction.step_seconds, rel_tol=1e-6):
        text += (
            " Without a flush a step has no end of its own: this is the first one, which fills the pipeline. Those"
            f" that follow take {seconds_text(prediction.step_seconds)}."
        )
    if lanes.window:
        text += f" Passes shorter than {seconds_text(lanes.window)} are merged with their neighbours."
    return text


def _spec(lanes: Lanes, kinds: list[str]) -> Spec:
    """Everything that the page needs to draw the visible part."""
    number = {kind: place for place, kind in enumerate(kinds)}
    unit = lanes.seconds / 1e7 or 1.0  # a screen has fewer columns; whole numbers are short
    ranks = len(lanes.uses)
    return {
        "seconds": lanes.seconds,
        "unit": unit,
        "kinds": [{"name": _WORDS.get(kind, kind), "colour": STEP[kind]} for kind in kinds],
        "ranks": ranks,
        "chunks": 1 + max((bar.chunk for lane in lanes.lanes for bar in lane.bars), default=0),
        "lanes": [
            {
                "rank": lane.rank,
                "computes": lane.stream == "computation",
                "bars": _flat(lane.bars, unit, number),
            }
            for lane in lanes.lanes
        ],
        "layout": layout(
            xaxis={"range": [0, lanes.seconds], **SECONDS},
            yaxis={
                "range": [ranks - 0.4, -0.5],
                "fixedrange": True,
                "tickvals": list(range(0, ranks, 1 + ranks // 40)),
                "ticktext": [f"stage {rank}" for rank in range(0, ranks, 1 + ranks // 40)],
                "showgrid": False,
                "zeroline": False,
            },
            barmode="overlay",
            bargap=0,
            dragmode="zoom",
            hovermode="closest",
        ),
    }


def _flat(bars: Sequence[Bar], unit: float, number: Mapping[str, int]) -> list[int]:
    """Bars as one list of whole numbers, times in `unit`: gap to the previous begin, duration, kind, micro-batch,
    chunk, slice, number of merged bars, and their busy time (0 for one)."""
    found, before = [], 0
    for bar in bars:
        start = round(bar.start / unit)
        busy = round(bar.busy / unit) if bar.count > 1 else 0
        length = round((bar.end - bar.start) / unit)
        found += [start - before, length, number[bar.kind], bar.micro_batch, bar.chunk, bar.slice, bar.count, busy]
        before = start
    return found


def _table(lanes: Lanes, stages: Sequence[StagePrediction], slices: int) -> Table:
    return Table(
        caption="How each pipeline rank spends the step",
        columns=(
            "pipeline rank",
            turn_text(slices),
            "once per step",
            "computation",
            "share",
            "exposed communication",
            "idle",
        ),
        rows=tuple(
            (
                str(use.rank),
                seconds_text(stage.micro_batch_seconds),
                seconds_text(stage.once_seconds),
                seconds_text(use.busy),
                percent_text(use.busy / lanes.seconds),
                seconds_text(use.exposed),
                seconds_text(use.idle),
            )
            for use, stage in zip(lanes.uses, stages, strict=True)
        ),
    )
