"""The cluster as nested boxes: what its levels are, and which axes of the mesh reach them."""

from dataclasses import dataclass

from planner.report.data.network import STAGES, AxisSpan, Network
from planner.report.units import bytes_text, seconds_text


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelView:
    """A level in words: its name, how it joins what, the axes that reach it and no further, what crosses it."""

    name: str
    text: str
    axes: tuple[str, ...]
    crosses: str


def level_views(network: Network) -> tuple[LevelView, ...]:
    """The levels, outermost first, so that each can hold the next."""
    views = []
    for place, level in enumerate(network.levels):
        inside = "devices" if place == 0 else f"units of level {network.levels[place - 1].name},"
        shared = f", {level.oversubscription:g} share an uplink" if level.oversubscription > 1 else ""
        sent = [one for one in network.crossings if one.level == level.name]
        views.append(
            LevelView(
                name=level.name,
                text=f"{level.units} {inside} joined by a {level.kind}, {level.bandwidth / 1e9:g} GB/s per device and"
                f" direction{shared}",
                axes=tuple(
                    _axis(axis, dict(axis.levels)[level.name], network.levels[place - 1].name if place else "")
                    for axis in network.axes
                    if axis.levels and axis.levels[-1][0] == level.name
                ),
                crosses=f"{bytes_text(sum(one.nbytes for one in sent))} in"
                f" {sum(one.messages for one in sent):,} messages a step and device,"
                f" {seconds_text(sum(one.seconds for one in sent))} on the wire"
                if sent
                else "nothing crosses it",
            )
        )
    return tuple(reversed(views))


def _axis(axis: AxisSpan, joined: int, unit: str) -> str:
    """`axis0: 4 devices, every 4th one, in 2 units of level node`."""
    which = "side by side" if axis.stride == 1 else f"every {_ordinal(axis.stride)} one"
    where = f", in {joined} units of level {unit}" if unit else ""
    return f"{'pipeline' if axis.name == STAGES else axis.name}: {axis.size} devices, {which}{where}"


def _ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"
