"""The time of the step by part, operator class and collective."""

from planner.report.data.network import Network
from planner.report.data.spending import Spending
from planner.report.html.colours import STEP, series
from planner.report.html.figure import SECONDS, Figure, Table, bars, layout, names_down
from planner.report.units import bytes_text, percent_text, seconds_text


def parts_figure(spending: Spending) -> Figure:
    """A bar for each part of the step."""
    parts, whole = spending.parts, spending.step_seconds
    texts = [
        f"{part.name}: {seconds_text(part.seconds)} ({percent_text(part.seconds / whole)})<br>spent on {part.resource}"
        for part in parts
    ]
    labels = [part.name for part in parts]
    colours = [STEP[part.name] for part in parts]
    largest = max(parts, key=lambda part: part.seconds)
    return Figure(
        key="time",
        title="Parts of the step",
        label=f"Parts of a step of {seconds_text(whole)}. The largest is {largest.name},"
        f" {percent_text(largest.seconds / whole)}. The table below has all.",
        caption=f"The busiest pipeline rank, stage {spending.busiest}, with its wait for other ranks."
        if any(part.name == "pipeline bubble" for part in parts)
        else "The parts sum to the step.",
        spec={
            "data": [bars("", labels, [part.seconds for part in parts], texts, colours)],
            "layout": layout(bargap=0.3, xaxis=SECONDS, yaxis=names_down(len(labels))),
        },
        table=Table(
            caption="Parts of the step",
            columns=("part", "spent on", "time", "share"),
            texts=2,
            rows=tuple(
                (part.name, part.resource, seconds_text(part.seconds), percent_text(part.seconds / whole))
                for part in parts
            ),
        ),
        height=60 + 30 * len(labels),
    )


def classes_figure(spending: Spending) -> Figure:
    """A bar per operator class, by part of the prediction."""
    names = list(dict.fromkeys(part for one in spending.classes for part, _ in one.seconds))
    labels = [one.name for one in spending.classes]
    data = []
    for name in names:
        seconds = [dict(one.seconds).get(name, 0.0) for one in spending.classes]
        texts = [f"{label}<br>{name}: {seconds_text(each)}" for label, each in zip(labels, seconds, strict=True)]
        data.append(bars(name, labels, seconds, texts, STEP[name]))
    return Figure(
        key="classes",
        title="Time by class of operator",
        label="Time of a step by class of operator. The table below has every number.",
        caption=f"The operators of stage {spending.busiest} over the step, without the optimizer, transfers between"
        " stages and waiting.",
        spec={
            "data": data,
            "layout": layout(barmode="stack", bargap=0.3, xaxis=SECONDS, yaxis=names_down(len(labels))),
        },
        table=Table(
            caption="Time by class of operator",
            columns=("class", "operators", *names, "time", "share of the step"),
            rows=tuple(
                (
                    one.name,
                    str(one.operators),
                    *(seconds_text(dict(one.seconds)[name]) if name in dict(one.seconds) else "" for name in names),
                    seconds_text(one.total),
                    percent_text(one.total / spending.step_seconds),
                )
                for one in spending.classes
            ),
        ),
        height=50 + 30 * len(labels),
        legend=tuple((STEP[name], name) for name in names),
    )


def crossings_figure(network: Network) -> Figure:
    """A bar per collective and axis, by the network level that it reaches."""
    rows = tuple(dict.fromkeys((one.level, one.along, one.kind) for one in network.crossings))
    parts = tuple(dict.fromkeys(one.part for one in network.crossings))
    labels = [f"{kind} along {along} ({level})" for level, along, kind in rows]
    data = []
    for number, part in enumerate(parts):
        found = {(one.level, one.along, one.kind): one for one in network.crossings if one.part == part}
        shown = [found.get(row) for row in rows]
        texts = [
            f"{label}<br>{part}: {one.messages:,} collectives, {bytes_text(one.nbytes)}, {seconds_text(one.seconds)}"
            if one is not None
            else ""
            for label, one in zip(labels, shown, strict=True)
        ]
        seconds = [one.seconds if one is not None else 0.0 for one in shown]
        data.append(bars(part, labels, seconds, texts, STEP.get(part, series(number))))
    return Figure(
        key="crossings",
        title="Communication",
        label="Seconds of collectives along each mesh axis, by kind. The table below has their number and bytes.",
        caption=f"Of one device of stage {network.rank} in a step. Overlapped communication counts in full, as if it"
        " ran alone. A collective counts at the outermost network level that it reaches.",
        spec={
            "data": data,
            "layout": layout(barmode="stack", bargap=0.3, xaxis=SECONDS, yaxis=names_down(len(labels))),
        },
        table=Table(
            caption="Communication",
            columns=("level", "along", "collective", "part of the step", "number", "bytes", "time alone"),
            texts=4,
            rows=tuple(
                (
                    one.level,
                    one.along,
                    one.kind,
                    one.part,
                    f"{one.messages:,}",
                    bytes_text(one.nbytes),
                    seconds_text(one.seconds),
                )
                for one in network.crossings
            ),
        ),
        height=50 + 30 * len(labels),
        legend=tuple((STEP.get(part, series(number)), part) for number, part in enumerate(parts)),
    )
