"""A machine made from a profile: how many devices in a node, how many nodes in a rack, which networks between them.

    h100-80gb       node=8@450,cluster@50                     as the profile has it
    compose         node=8@450,rack=4@50,cluster=16@25/2      four nodes a rack, 16 racks behind uplinks shared by two

A text names every level, innermost first: NAME=COUNT@BANDWIDTH/OVERSUBSCRIPTION. COUNT units of the level below form
one unit of this one. BANDWIDTH is in GB/s (1e9 bytes/s) per device and direction. The ports of a unit's devices
together carry OVERSUBSCRIPTION times as much as its uplink. What the text leaves out is taken from the profile. The
kind of network, and the latencies and efficiencies of protocols, always are: another bandwidth means a faster link, not
another library.

A level that the profile does not have is made from the next outer level that it has, or from its outermost one. A level
of the profile that the text does not name is left out. Two things are never guessed: counts that the profile cannot
know, and the bandwidth of a mesh of direct links whose count changes, because it depends on the number of a device's
links.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hardware_profiles.cluster import Cluster, Fact
from hardware_profiles.errors import TopologyError
from hardware_profiles.load import load_profile
from hardware_profiles.network import RATES, Level, is_rate
from hardware_profiles.units import GB, BytesPerSecond

_FORM = "write NAME=COUNT@GB_PER_S/OVERSUBSCRIPTION for every level, innermost first, as in node=8@300,cluster@25/2"
_NAME = r"[^\W\d][\w .-]*"
_NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?"
_LEVEL = re.compile(
    rf"(?P<name>{_NAME})(?:=(?P<count>[0-9]{{1,9}}))?(?:@(?P<bandwidth>{_NUMBER}))?(?:/(?P<over>{_NUMBER}))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelChoice:
    """What is asked of one level; None: as in the profile. `bandwidth` is in bytes/s per device and direction."""

    name: str
    fan_out: int | None = None
    bandwidth: BytesPerSecond | None = None
    oversubscription: float | None = None


def compose(profile: Cluster | str, levels: str | Sequence[LevelChoice]) -> Cluster:
    """The devices of a profile under the given levels, with one node of them in use.

    Args:
        profile: a cluster from `load_profile`, or the name of a profile; it must not be composed already.
        levels: all levels, innermost first, as `LevelChoice` or as a text (see the top of this file).

    Returns:
        A cluster of the same name. Its `composition` is the text that makes it from the profile again. If nothing
            differs, the profile itself.

    Raises:
        UnknownProfileError: no profile of that name.
        TopologyError: a text that cannot be read, or levels that do not fit together; the message says what to do.
    """
    profile = load_profile(profile) if isinstance(profile, str) else profile
    if profile.composition:
        raise TopologyError(
            f"{profile.name} is composed already, of {profile.composition}; compose the profile itself, once"
        )
    choices = parse_levels(levels) if isinstance(levels, str) else tuple(levels)
    if not choices:
        raise TopologyError(f"a cluster needs levels; {_FORM}")
    _check_names(profile, choices)
    made = tuple(_made(profile, choices, place) for place in range(len(choices)))
    return _with_levels(profile, made, [_model(profile, choices, place)[0] for place in range(len(choices))])


def with_network(
    cluster: Cluster,
    *,
    bandwidth: Mapping[str, BytesPerSecond] | None = None,
    devices_per_node: int | None = None,
) -> Cluster:
    """The cluster with stated figures of its network, as published runs give them.

        with_network(load_profile("a100-40gb"), bandwidth={"cluster": 4 * 100e9 / 8 / 8})     4 x 100 Gb/s for 8 devices

    Args:
        bandwidth: bytes/s per device and direction, by level name; other levels keep theirs.
        devices_per_node: fan-out of the innermost level. 1 leaves that level out.

    Returns:
        A cluster with one node in use. Protocols keep their latencies and efficiencies.

    Raises:
        TopologyError: a level that the cluster does not have, or a mesh whose count changes without its bandwidth.
    """
    wanted = dict(bandwidth or {})
    known = [level.name for level in cluster.levels]
    if strange := sorted(set(wanted) - set(known)):
        raise TopologyError(f"{cluster.name} has no level called {strange[0]}; its levels are {', '.join(known)}")
    levels, origins = list(cluster.levels), list(range(len(cluster.levels)))
    if devices_per_node is not None and devices_per_node < 1:
        raise TopologyError(f"devices_per_node is {devices_per_node}; it is 1 or more")
    if devices_per_node == 1:
        if len(levels) == 1:
            raise TopologyError(f"{cluster.name} has no level around its {known[0]}: nothing would connect its devices")
        levels, origins = levels[1:], origins[1:]
    elif devices_per_node is not None and devices_per_node != levels[0].fan_out:
        levels[0] = _resized(cluster.name, levels[0], devices_per_node, wanted.get(levels[0].name))
    levels = [replace(one, bandwidth=_rounded(wanted.get(one.name, one.bandwidth))) for one in levels]
    return _with_levels(cluster, tuple(levels), origins)


def parse_levels(text: str) -> tuple[LevelChoice, ...]:
    """The levels that a text names (see the top of this file). Raises `TopologyError`, which quotes the part it cannot
    read."""
    found = []
    for word in text.split(","):
        match = _LEVEL.fullmatch(word.strip())
        if match is None:
            raise TopologyError(f"'{word.strip()}' is not a level; {_FORM}")
        count, bandwidth, over = match["count"], match["bandwidth"], match["over"]
        found.append(
            LevelChoice(
                name=match["name"],
                fan_out=None if count is None else int(count),
                bandwidth=None if bandwidth is None else float(bandwidth) * GB,
                oversubscription=None if over is None else float(over),
            )
        )
    return tuple(found)


def _check_names(profile: Cluster, choices: Sequence[LevelChoice]) -> None:
    names, known = [choice.name for choice in choices], [level.name for level in profile.levels]
    if odd := [name for name in names if not re.fullmatch(_NAME, name)]:
        raise TopologyError(f"'{odd[0]}' is not a name of a level; use letters and digits")
    if len(set(names)) != len(names):
        raise TopologyError(f"levels {', '.join(names)}: one name stands twice; levels need different names")
    unnamed = [name for name in known if name not in names]
    for name in names:
        if name not in known and (meant := difflib.get_close_matches(name, unnamed, n=1, cutoff=0.75)):
            raise TopologyError(f"{profile.name} has no level called {name}; did you mean {meant[0]}?")
    common = [name for name in names if name in known]
    if common != [name for name in known if name in common]:
        raise TopologyError(
            f"levels {', '.join(names)}: {profile.name} has {', '.join(known)}, innermost first; name them so"
        )


def _model(profile: Cluster, choices: Sequence[LevelChoice], place: int) -> tuple[int, bool]:
    """Index of the profile's level that a level is made from, and whether it is that level itself."""
    known = [level.name for level in profile.levels]
    if choices[place].name in known:
        return known.index(choices[place].name), True
    outer = [known.index(choice.name) for choice in choices[place:] if choice.name in known]
    return (outer[0] if outer else len(known) - 1), False


def _made(profile: Cluster, choices: Sequence[LevelChoice], place: int) -> Level:
    """One level, made from the level of the profile that it is or resembles."""
    choice, (index, itself) = choices[place], _model(profile, choices, place)
    model, fan_out = profile.levels[index], _fan_out(profile, choices, place)
    level = replace(model, name=choice.name)
    if fan_out != model.fan_out or not itself:
        level = _resized(profile.name, level, fan_out, choice.bandwidth)
    over = level.oversubscription if choice.oversubscription is None else choice.oversubscription
    wanted = level.bandwidth if choice.bandwidth is None else choice.bandwidth
    return replace(level, bandwidth=_rounded(wanted), oversubscription=over)


def _fan_out(profile: Cluster, choices: Sequence[LevelChoice], place: int) -> int | None:
    """How many units a level joins: as asked, or as in the profile if the level joins the same units there."""
    choice, (index, itself) = choices[place], _model(profile, choices, place)
    if choice.fan_out is not None:
        return choice.fan_out
    inside = [one.name for one in choices[:place]]
    known = profile.levels[index].fan_out if itself else None
    same = inside == [level.name for level in profile.levels[:index]]
    if known is not None and same:
        return known
    if known is None and place == len(choices) - 1:
        return None
    units = f"{inside[-1]} units" if inside else "devices"
    raise TopologyError(
        f"level {choice.name}: {profile.name} does not say how many {units} are in one; say it, as in {choice.name}=4"
    )


def _resized(profile: str, level: Level, fan_out: int | None, bandwidth: BytesPerSecond | None) -> Level:
    """A level with another fan-out; a mesh then needs a stated bandwidth."""
    if fan_out is not None and fan_out < 2:
        raise TopologyError(f"level {level.name}={fan_out}: a level joins 2 or more; leave it out")
    if level.network == "mesh" and fan_out != level.fan_out and bandwidth is None:
        raise TopologyError(
            f"level {level.name} of {profile} is a mesh of direct links, whose bandwidth depends on how many a device"
            f" has; say it with the count {fan_out}, in GB/s per device and direction, as in {level.name}={fan_out}@100"
        )
    return replace(level, fan_out=fan_out)


def _with_levels(base: Cluster, levels: tuple[Level, ...], origins: Sequence[int]) -> Cluster:
    """The cluster with these levels; `origins` has for each the index of the level of `base` that it is made from."""
    for level in levels:
        if not (is_rate(level.bandwidth) and is_rate(level.bandwidth / max(1.0, level.oversubscription))):
            over = f" / {level.oversubscription:g}" if level.oversubscription != 1 else ""
            raise TopologyError(f"level {level.name} has a bandwidth of {level.bandwidth / GB:g}{over} GB/s; {RATES}")
    if levels == base.levels:
        return replace(base, devices=levels[0].fan_out or 1)
    told = ["/" in base.composition or base.levels[origin].oversubscription != 1 for origin in origins]
    text = ",".join(_text(level, also) for level, also in zip(levels, told, strict=True))
    facts = tuple(_facts(base, levels, origins, text))
    return replace(base, levels=levels, devices=levels[0].fan_out or 1, composition=text, facts=facts)


def _facts(base: Cluster, levels: Sequence[Level], origins: Sequence[int], text: str) -> Iterator[Fact]:
    """The sources of the numbers: those of a level move with it, and numbers that were asked for say so."""
    yield from (fact for fact in base.facts if not fact.key.startswith("level."))
    for place, (level, origin) in enumerate(zip(levels, origins, strict=True)):
        start, old = f"level.{origin}.", base.levels[origin]
        asked = {
            "fan_out": (level.fan_out, old.fan_out),
            "bandwidth_gb_per_s": (level.bandwidth / GB, old.bandwidth / GB),
            "oversubscription": (level.oversubscription, old.oversubscription),
        }
        changed = {key: value for key, (value, before) in asked.items() if value is not None and value != before}
        for fact in base.facts:
            key = fact.key.removeprefix(start)
            if fact.key.startswith(start) and key not in changed and not (key == "fan_out" and level.fan_out is None):
                yield replace(fact, key=f"level.{place}.{key}")
        for key, value in changed.items():
            yield Fact(key=f"level.{place}.{key}", value=value, source=f"asked for: {text}", kind="assumed")


def _text(level: Level, also_one: bool) -> str:
    """A level as text, with everything stated; `also_one`: also an oversubscription of 1, as the profile may have
    another."""
    count = "" if level.fan_out is None else f"={level.fan_out}"
    over = f"/{level.oversubscription!r}".removesuffix(".0") if also_one or level.oversubscription != 1 else ""
    return f"{level.name}{count}@{_gigabytes(level.bandwidth)}{over}"


def _gigabytes(bandwidth: BytesPerSecond) -> str:
    return f"{bandwidth / GB:.12g}"


def _rounded(bandwidth: BytesPerSecond) -> BytesPerSecond:
    """The bandwidth that its text reads back to, so that the text always gives exactly the same machine."""
    return float(_gigabytes(bandwidth)) * GB
