"""Memory of the devices: by class against the capacity, and over the step."""

from itertools import groupby

from hardware_profiles.units import GIB
from planner.report.data.memory import Curve, Memory, RankMemory
from planner.report.html.colours import MEMORY, series
from planner.report.html.figure import SECONDS, Figure, Spec, Table, bars, layout, names_down
from planner.report.units import bytes_text, percent_text, seconds_text


def classes_figure(memory: Memory) -> Figure:
    """Stacked bars of every rank, with a line at the capacity of a device."""
    names = [name for name, _ in memory.ranks[0].classes]
    labels = [_stage(one) for one in memory.ranks]
    data = []
    for place, name in enumerate(names):
        amounts = [one.classes[place][1] for one in memory.ranks]
        texts = [
            f"{label}<br>{name}: {bytes_text(amount)} ({percent_text(amount / one.capacity_bytes)} of the device)"
            for label, one, amount in zip(labels, memory.ranks, amounts, strict=True)
        ]
        data.append(bars(name, labels, [amount / GIB for amount in amounts], texts, MEMORY[name]))
    return Figure(
        key="memory",
        title="Memory by class",
        label=f"Memory of a device of each pipeline rank by class, of {_capacities(memory)}. The table below has every"
        " number.",
        caption=f"At the peak of each stage. The dashed line is the capacity of a device: {_capacities(memory)}.",
        spec={
            "data": data,
            "layout": layout(
                x="GiB",
                barmode="stack",
                bargap=0.25,
                yaxis=names_down(len(labels)),
                shapes=_limits_of_ranks(memory),
                xaxis={"range": [0, 1.06 * max(memory.capacity_bytes, *(r.peak_bytes for r in memory.ranks)) / GIB]},
            ),
        },
        table=Table(
            caption="Memory of a device of each pipeline rank",
            columns=("pipeline rank", *names, "peak", "micro-batches in flight", "activations of each"),
            rows=tuple(_row(one) for one in memory.ranks),
        ),
        height=70 + max(18, min(44, 800 // len(labels))) * len(labels),
        legend=tuple((MEMORY[name], name) for name in names),
    )


def _row(one: RankMemory) -> tuple[str, ...]:
    amounts = (bytes_text(amount) for _, amount in one.classes)
    return (_rank(one), *amounts, bytes_text(one.peak_bytes), str(one.live), bytes_text(one.held_bytes))


def _rank(one: RankMemory | Curve) -> str:
    """`2`, or `2 on a100-80gb` where there are several kinds of devices."""
    return f"{one.rank} on {one.group}" if one.group else str(one.rank)


def _stage(one: RankMemory | Curve) -> str:
    return f"stage {_rank(one)}"


def _capacities(memory: Memory) -> str:
    """The capacity of each kind of devices."""
    found = {one.group: one.capacity_bytes for one in memory.ranks}
    if len(set(found.values())) == 1:
        return bytes_text(memory.capacity_bytes)
    return ", ".join(f"{bytes_text(capacity)} on {group}" for group, capacity in found.items())


def _limits_of_ranks(memory: Memory) -> list[Spec]:
    """The lines at the capacities, vertically along the ranks that have them."""
    found, first = [], 0
    runs = [(capacity, len([*own])) for capacity, own in groupby(one.capacity_bytes for one in memory.ranks)]
    for capacity, count in runs:
        ends: Spec = {"y0": 0, "y1": 1, "yref": "paper"}
        if len(runs) > 1:
            ends = {"y0": first - 0.5, "y1": first + count - 0.5}
        found.append(_line({**ends, "x0": capacity / GIB, "x1": capacity / GIB}))
        first += count
    return found


def _limits(memory: Memory) -> list[Spec]:
    """The lines at the capacities, across the figure."""
    places = dict.fromkeys(one.capacity_bytes / GIB for one in memory.ranks)
    return [_line({"x0": 0, "x1": 1, "xref": "paper", "y0": place, "y1": place}) for place in places]


def _line(ends: Spec) -> Spec:
    return {"type": "line", **ends, "line": {"color": "@limit", "width": 2, "dash": "dash"}}


def _only_some(memory: Memory) -> str:
    drawn, ranks = len(memory.curves), len(memory.ranks)
    return f" Of {ranks} stages {drawn} are drawn: the first, the last and the fullest." if drawn < ranks else ""


def curves_figure(memory: Memory) -> Figure:
    """The stored bytes, and those of the micro-batches in flight, over the step."""
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": _stage(curve),
            "x": list(curve.times),
            "y": [round(nbytes / GIB, 4) for nbytes in curve.nbytes],
            "line": {"shape": "hv", "color": series(number), "width": 1.3},
            "hovertemplate": f"{_stage(curve)}<br>%{{x:.4~s}}s: %{{y:.4~g}} GiB<extra></extra>",
        }
        for number, curve in enumerate(memory.curves)
    ]
    most = max(max(curve.nbytes) for curve in memory.curves)
    return Figure(
        key="memory-curve",
        title="Memory over the step",
        label="Memory of a device over the step, by pipeline rank: stored tensors, and activations of micro-batches in"
        f" flight. At most {bytes_text(most)}.",
        caption="Stored tensors, the workspace of passes, and the activations of each micro-batch from its forward to"
        " the end of its backward pass. An upper bound, without the slack of the allocator." + _only_some(memory),
        spec={
            "data": data,
            "layout": layout(
                y="GiB",
                xaxis=SECONDS,
                shapes=_limits(memory),
                yaxis={"range": [0, 1.06 * max(memory.capacity_bytes, most) / GIB], "fixedrange": True},
            ),
        },
        table=Table(
            caption="Memory over the step",
            columns=("pipeline rank", "minimum", "maximum", "time of the maximum"),
            rows=tuple(
                (
                    _rank(curve),
                    bytes_text(min(curve.nbytes)),
                    bytes_text(max(curve.nbytes)),
                    seconds_text(curve.times[curve.nbytes.index(max(curve.nbytes))]),
                )
                for curve in memory.curves
            ),
        ),
        height=280,
        legend=tuple((series(number), _stage(curve)) for number, curve in enumerate(memory.curves)),
    )
