"""The cluster as nested boxes: its levels, and the mesh axes that reach them."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.report.data.network import STAGES, AxisSpan, Crossing, Network, NetworkGroup, NetworkLevel
from planner.report.units import bytes_text, seconds_text


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelView:
    """A level in words: its name, how it joins devices, the axes that reach it and no further, and the communication
    over it."""

    name: str
    text: str
    axes: tuple[str, ...]
    crosses: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """Devices of one kind in words; `title` is empty if all are alike. Levels are outermost first, so that each can
    hold the next."""

    title: str
    levels: tuple[LevelView, ...]


def group_views(network: Network) -> tuple[GroupView, ...]:
    """The levels of all devices; with several kinds first the level between them, then each group."""
    if network.between is None:
        return (GroupView(title="", levels=_views(network.levels, network.axes, network.crossings)),)
    between = _view(network.between, "groups", (), network.crossings)
    views = [GroupView(title="All groups", levels=(between,))]
    for group in network.groups:
        own = group.first_rank <= network.rank < group.first_rank + group.ranks
        levels = _views(group.levels, group.axes, network.crossings if own else None)
        views.append(GroupView(title=_title(group), levels=levels))
    return tuple(views)


def _title(group: NetworkGroup) -> str:
    last = group.first_rank + group.ranks - 1
    stages = f"stage {last}" if group.ranks == 1 else f"stages {group.first_rank} to {last}"
    return f"{group.profile}: {stages}, {group.devices:,} devices"


def _views(
    levels: Sequence[NetworkLevel], axes: Sequence[AxisSpan], crossings: Sequence[Crossing] | None
) -> tuple[LevelView, ...]:
    """The levels, outermost first; `crossings` is None if those of other devices are counted."""
    views = []
    for place, level in enumerate(levels):
        below = levels[place - 1].name if place else ""
        reaching = tuple(
            _axis(axis, dict(axis.levels)[level.name], below)
            for axis in axes
            if axis.levels and axis.levels[-1][0] == level.name
        )
        views.append(_view(level, f"units of level {below}," if place else "devices", reaching, crossings))
    return tuple(reversed(views))


def _view(level: NetworkLevel, inside: str, axes: tuple[str, ...], crossings: Sequence[Crossing] | None) -> LevelView:
    shared = f", {level.oversubscription:g} share an uplink" if level.oversubscription > 1 else ""
    return LevelView(
        name=level.name,
        text=f"{level.units} {inside} joined by a {level.kind}, {level.bandwidth / 1e9:g} GB/s per device and"
        f" direction{shared}",
        axes=axes,
        crosses="" if crossings is None else _crosses([one for one in crossings if one.level == level.name]),
    )


def _crosses(sent: Sequence[Crossing]) -> str:
    if not sent:
        return "no communication"
    return (
        f"{bytes_text(sum(one.nbytes for one in sent))} in {sum(one.messages for one in sent):,} collectives per step"
        f" and device, {seconds_text(sum(one.seconds for one in sent))} if none overlapped"
    )


def _axis(axis: AxisSpan, joined: int, unit: str) -> str:
    """`axis0: 4 devices, every 4th one, in 2 units of level node`."""
    which = "side by side" if axis.stride == 1 else f"every {_ordinal(axis.stride)} one"
    where = f", in {joined} units of level {unit}" if unit else ""
    return f"{'pipeline' if axis.name == STAGES else axis.name}: {axis.size} devices, {which}{where}"


def _ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"
