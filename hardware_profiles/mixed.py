"""A machine of several kinds of devices: groups, each a cluster of its own, and the network between them.

    group 0  h100-80gb:32        stage 0   stage 1        groups stand in the order of the pipeline: the first devices
       |  between                                         are those of the first group
    group 1  a100-80gb:32        stage 2   stage 3        a stage lies within one group

A group is a profile and a number of its devices, `h100-80gb:32`. Levels stand in brackets if its network differs from
the profile (see `hardware_profiles.compose`): `h100-80gb[node=8,cluster@25]:32`. Commas separate groups. `between@12.5`
is the bandwidth between groups in GB/s per device and direction. Without it, a message between two groups takes as long
as over the slower of their outermost levels.

Not modelled: messages between groups that contend with those inside a group, and a group that reaches different groups
over different networks.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from hardware_profiles.cluster import Cluster
from hardware_profiles.compose import compose
from hardware_profiles.device import DeviceType
from hardware_profiles.errors import TopologyError
from hardware_profiles.load import load_profile
from hardware_profiles.network import RATES, Group, Span, is_rate
from hardware_profiles.software import Software
from hardware_profiles.units import GB, BytesPerSecond

_FORM = "groups are written PROFILE:DEVICES, as in h100-80gb:32,a100-80gb:32,between@12.5"
_GROUP = re.compile(r"(?P<profile>[^\[\]]+?)(?:\[(?P<levels>[^\[\]]+)\])?:(?P<devices>[0-9]{1,9})")
_BETWEEN = re.compile(r"between@(?P<bandwidth>[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChoice:
    """One group of a text: its profile, the levels that differ from it, and the number of devices."""

    profile: str
    levels: str
    devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedCluster:
    """Groups of devices in the order of the pipeline, each with its devices in use; all run the same software.

    `bandwidth` is that between groups, bytes/s per device and direction; None: that of the slower outermost level.
    """

    groups: tuple[Cluster, ...]
    bandwidth: BytesPerSecond | None = None

    def __post_init__(self) -> None:
        _check(self.groups, self.bandwidth)

    @property
    def name(self) -> str:
        """The text that describes the machine, groups in the order of the pipeline, with all differences from the
        profiles."""
        words = [f"{one.name}{f'[{one.composition}]' if one.composition else ''}:{one.devices}" for one in self.groups]
        if self.bandwidth is not None:
            words.append(f"between@{self.bandwidth / GB:.12g}")
        return ",".join(words)

    @property
    def composition(self) -> str:
        """Empty: the name has the composition of every group."""
        return ""

    @property
    def devices(self) -> int:
        """Number of devices in all groups."""
        return sum(one.devices for one in self.groups)

    @property
    def software(self) -> Software:
        """The software of all groups."""
        return self.groups[0].software

    @property
    def device_type(self) -> DeviceType:
        """The device type of all groups."""
        return self.groups[0].device.device_type

    def with_software(self, software: Software) -> "MixedCluster":
        """The same machines with other software."""
        return replace(self, groups=tuple(one.with_software(software) for one in self.groups))

    def with_devices(self, devices: int) -> "MixedCluster":
        """The same machine, whose groups state the number of devices. Raises `TopologyError` for another number."""
        if devices != self.devices:
            raise TopologyError(
                f"{self.name} has {self.devices} devices, asked for {devices}; say how many of each group, or leave the"
                " number of all out"
            )
        return self

    def ordered(self, order: tuple[int, ...]) -> "MixedCluster":
        """The same groups in another order of the pipeline."""
        return replace(self, groups=tuple(self.groups[at] for at in order))

    def digest(self) -> str:
        """sha256 over the digests of the groups, their devices and the bandwidth between them."""
        words = [f"{one.digest()}:{one.devices}" for one in self.groups]
        return hashlib.sha256(",".join([*words, f"{self.bandwidth}"]).encode()).hexdigest()

    def group_of_rank(self, rank: int, ranks: int) -> int:
        """Number of the group that holds pipeline rank `rank` of `ranks` ranks of equally many devices.

        Raises `TopologyError` for a rank out of range, or ranks that do not fit the groups.
        """
        _check_ranks(self, ranks)
        first, ends = rank * (self.devices // ranks), 0
        for number, group in enumerate(self.groups):
            ends += group.devices
            if first < ends:
                return number
        raise TopologyError(f"pipeline rank {rank} of {ranks}: they are counted from 0")

    def between(self, one: int, other: int, count: int = 2) -> tuple[Group, ...]:
        """The links over which `count` devices in groups `one` and `other` meet; the slowest link counts."""
        return tuple(
            Group(spans=(_span(self.groups[at], self.bandwidth, count),)) for at in dict.fromkeys((one, other))
        )


Machine = Cluster | MixedCluster
"""A machine that a plan can be made for."""


def parts_of(machine: Machine) -> tuple[Cluster, ...]:
    """The groups of a machine; a cluster of one kind is its only group."""
    return machine.groups if isinstance(machine, MixedCluster) else (machine,)


def device_type_of(machine: Machine) -> DeviceType:
    """The device type of all devices of a machine."""
    return parts_of(machine)[0].device.device_type


def clusters_of_ranks(machine: Machine, ranks: int) -> tuple[Cluster, ...]:
    """The cluster of each pipeline rank. Raises `TopologyError` if a rank would lie in two groups."""
    if isinstance(machine, Cluster):
        return (machine,) * ranks
    return tuple(machine.groups[machine.group_of_rank(rank, ranks)] for rank in range(ranks))


def links_of_ranks(machine: Machine, one: int, other: int, ranks: int, stride: int) -> tuple[Group, ...]:
    """The links between a device of one pipeline rank and one of another; the slowest link counts.

    Ranks have `stride` devices each. Raises: as `MixedCluster.group_of_rank` and `Cluster.group`.
    """
    distance = abs(one - other) * stride
    if isinstance(machine, Cluster):
        return (machine.group(2, distance),)
    homes = machine.group_of_rank(one, ranks), machine.group_of_rank(other, ranks)
    if homes[0] == homes[1]:
        return (machine.groups[homes[0]].group(2, distance),)
    return machine.between(*homes)


def links_of_all(machine: Machine, ranks: int, stride: int) -> tuple[Group, ...]:
    """The links over which one device of each pipeline rank meet; the slowest link counts."""
    if isinstance(machine, Cluster):
        return (machine.group(ranks, stride),)
    return tuple(
        group for one, other in pairwise(range(len(machine.groups))) for group in machine.between(one, other, ranks)
    )


def of_one_kind(machine: Machine, what: str) -> Cluster:
    """The machine as a cluster of one kind. Raises `TopologyError` for several kinds, which have no `what`."""
    if isinstance(machine, MixedCluster):
        raise TopologyError(
            f"{machine.name} has several kinds of devices, for which there is no {what}; name one profile"
        )
    return machine


def is_mixed(text: str) -> bool:
    """Whether a text describes groups and not a profile or its file."""
    return not text.endswith(".toml") and ("," in text or re.search(r":[0-9]+$", text) is not None)


def parse_mixed(text: str) -> tuple[tuple[GroupChoice, ...], BytesPerSecond | None]:
    """The groups that a text names, and the bandwidth between them in bytes/s, or None.

    Raises `TopologyError`, which quotes the part it cannot read.
    """
    groups, bandwidth = list[GroupChoice](), None
    for word in _words(text):
        if match := _BETWEEN.fullmatch(word):
            if bandwidth is not None:
                raise TopologyError(f"'{text}': between stands twice; {_FORM}")
            bandwidth = float(match["bandwidth"]) * GB
            continue
        match = _GROUP.fullmatch(word)
        if match is None:
            raise TopologyError(f"'{word}' is not a group of devices; {_FORM}")
        groups.append(
            GroupChoice(profile=match["profile"], levels=match["levels"] or "", devices=int(match["devices"]))
        )
    return tuple(groups), bandwidth


def load_mixed(text: str, load: Callable[[str], Cluster] = load_profile) -> MixedCluster:
    """The machine that a text describes (see the top of this file); `load` gives the cluster of a profile.

    Raises:
        TopologyError: groups that cannot be read, or that do not fit together; the message says what to do.
        UnknownProfileError, InvalidProfileError: a profile that does not exist or cannot be read.
    """
    choices, bandwidth = parse_mixed(text)
    if len(choices) == 1:
        only = choices[0]
        raise TopologyError(
            f"'{text}' has one group of devices; say --hardware {only.profile} --devices {only.devices}, or add another"
            " group"
        )
    groups = []
    for one in choices:
        cluster = load(one.profile)
        if one.levels:
            cluster = compose(cluster, one.levels)
        groups.append(cluster.with_devices(one.devices))
    return MixedCluster(groups=tuple(groups), bandwidth=bandwidth)


def load_machine(text: str) -> Machine:
    """A profile by its name or file, or a machine of several kinds of devices. Raises: as `load_mixed` and
    `load_profile`."""
    return load_mixed(text) if is_mixed(text) else load_profile(text)


def _words(text: str) -> Iterator[str]:
    """The parts between commas that are not in brackets."""
    yield from (word.strip() for word in re.split(r",(?![^\[]*\])", text))


def _span(cluster: Cluster, bandwidth: BytesPerSecond | None, count: int) -> Span:
    """The outermost level of a group as a link to other groups."""
    level = replace(cluster.levels[-1], network="switch", fan_out=None)
    if bandwidth is not None:
        level = replace(level, bandwidth=bandwidth, oversubscription=1.0)
    return Span(level=level, count=count)


def _check(groups: tuple[Cluster, ...], bandwidth: BytesPerSecond | None) -> None:
    if len(groups) < 2:
        raise TopologyError("a machine of several kinds of devices has two groups or more; for one, name its profile")
    if bandwidth is not None and not is_rate(bandwidth):
        raise TopologyError(f"between@{bandwidth / GB:g} is a bandwidth of {bandwidth / GB:g} GB/s; {RATES}")
    kinds = {one.device.device_type: one.name for one in groups}
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.items())[:2]
        raise TopologyError(
            f"{first} has {one} devices and {second} has {other} devices, which no backend of collectives connects; use"
            " groups of one device type"
        )
    if bandwidth is None and len({(one.name, one.device, one.levels) for one in groups}) == 1:
        total = sum(one.devices for one in groups)
        raise TopologyError(
            f"all groups are {groups[0].name}: say --hardware {groups[0].name} --devices {total}, or what is between"
            " them, as in between@12.5"
        )
    for group in groups if bandwidth is None else ():
        if group.levels[-1].network == "mesh":
            raise TopologyError(
                f"the outermost level of {group.name}, {group.levels[-1].name}, is a mesh of direct links, which leads"
                " nowhere else; say what is between the groups, as in between@12.5"
            )


def _check_ranks(machine: MixedCluster, ranks: int) -> None:
    sizes = [one.devices for one in machine.groups]
    if ranks < 1 or machine.devices % ranks or any(size % (machine.devices // ranks) for size in sizes):
        most = math.gcd(*sizes)
        raise TopologyError(
            f"{ranks} pipeline ranks on groups of {', '.join(map(str, sizes))} devices: a stage lies within one group"
            f" and all have equally many devices, at most {most}; {machine.devices // most} ranks are the fewest"
        )
