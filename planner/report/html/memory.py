"""Memory of the devices: by class against what they have, and over the step."""

from hardware_profiles.units import GIB
from planner.report.data.memory import Memory, RankMemory
from planner.report.html.colours import MEMORY, series
from planner.report.html.figure import SECONDS, Figure, Spec, Table, bars, layout, names_down
from planner.report.units import bytes_text, percent_text, seconds_text


def classes_figure(memory: Memory) -> Figure:
    """Stacked bars of every rank, and a line where a device is full."""
    names = [name for name, _ in memory.ranks[0].classes]
    labels = [f"stage {one.rank}" for one in memory.ranks]
    data = []
    for place, name in enumerate(names):
        amounts = [one.classes[place][1] for one in memory.ranks]
        texts = [
            f"{label}<br>{name}: {bytes_text(amount)} ({percent_text(amount / memory.capacity_bytes)} of the device)"
            for label, amount in zip(labels, amounts, strict=True)
        ]
        data.append(bars(name, labels, [amount / GIB for amount in amounts], texts, MEMORY[name]))
    return Figure(
        key="memory",
        title="Memory by class",
        label=f"Memory of a device of each pipeline rank by class, of {bytes_text(memory.capacity_bytes)}. The table"
        " below has every number.",
        caption=f"When a device holds most. The line is what it has: {bytes_text(memory.capacity_bytes)}.",
        spec={
            "data": data,
            "layout": layout(
                x="GiB",
                barmode="stack",
                bargap=0.25,
                yaxis=names_down(len(labels)),
                shapes=[_full(memory, across=False)],
                xaxis={"range": [0, 1.06 * max(memory.capacity_bytes, *(r.peak_bytes for r in memory.ranks)) / GIB]},
            ),
        },
        table=Table(
            caption="Memory of a device of each pipeline rank",
            columns=("pipeline rank", *names, "peak", "in flight", "each holds"),
            rows=tuple(_row(one) for one in memory.ranks),
        ),
        height=70 + max(18, min(44, 800 // len(labels))) * len(labels),
        legend=tuple((MEMORY[name], name) for name in names),
    )


def _row(one: RankMemory) -> tuple[str, ...]:
    amounts = (bytes_text(amount) for _, amount in one.classes)
    return (str(one.rank), *amounts, bytes_text(one.peak_bytes), str(one.live), bytes_text(one.held_bytes))


def _full(memory: Memory, *, across: bool) -> Spec:
    """The line at the capacity, `across` the figure or down it."""
    place = memory.capacity_bytes / GIB
    far, near = ("x", "y") if across else ("y", "x")
    ends = {f"{far}0": 0, f"{far}1": 1, f"{far}ref": "paper", f"{near}0": place, f"{near}1": place}
    return {"type": "line", **ends, "line": {"color": "@limit", "width": 2, "dash": "dash"}}


def _only_some(memory: Memory) -> str:
    drawn, ranks = len(memory.curves), len(memory.ranks)
    return f" Of {ranks} stages {drawn} are drawn: the first, the last and the fullest." if drawn < ranks else ""


def curves_figure(memory: Memory) -> Figure:
    """What is stored, and what micro-batches in flight hold, over the step."""
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"stage {curve.rank}",
            "x": list(curve.times),
            "y": [round(nbytes / GIB, 4) for nbytes in curve.nbytes],
            "line": {"shape": "hv", "color": series(number), "width": 1.3},
            "hovertemplate": f"stage {curve.rank}<br>%{{x:.4~s}}s: %{{y:.4~g}} GiB<extra></extra>",
        }
        for number, curve in enumerate(memory.curves)
    ]
    most = max(max(curve.nbytes) for curve in memory.curves)
    return Figure(
        key="memory-curve",
        title="Memory over the step",
        label="Memory of a device over the step, by pipeline rank: what is stored, what micro-batches in flight hold."
        f" At most {bytes_text(most)}.",
        caption="What is stored and what passes need while they run, and on it what every micro-batch holds from its"
        " forward to the end of its backward pass. A line from above; what allocators hold beyond tensors is left out."
        + _only_some(memory),
        spec={
            "data": data,
            "layout": layout(
                y="GiB",
                xaxis=SECONDS,
                shapes=[_full(memory, across=True)],
                yaxis={"range": [0, 1.06 * max(memory.capacity_bytes, most) / GIB], "fixedrange": True},
            ),
        },
        table=Table(
            caption="Memory over the step",
            columns=("pipeline rank", "least", "most", "first at most"),
            rows=tuple(
                (
                    str(curve.rank),
                    bytes_text(min(curve.nbytes)),
                    bytes_text(max(curve.nbytes)),
                    seconds_text(curve.times[curve.nbytes.index(max(curve.nbytes))]),
                )
                for curve in memory.curves
            ),
        ),
        height=280,
        legend=tuple((series(number), f"stage {curve.rank}") for number, curve in enumerate(memory.curves)),
    )
