"""A machine as plain values: a device, and the hierarchy of networks between many of them.

    level 1 "cluster"   [ node ]----[ node ]----[ node ] ...      fan_out None: unbounded
                          |
    level 0 "node"      d0 d1 d2 d3 d4 d5 d6 d7                   fan_out 8

Devices are numbered innermost level first: device 9 above is d1 of the second node. Every level gives its bandwidth per
device and direction, so a node of eight devices reaches the cluster network with eight times the figure of that level.

Simultaneous groups. A collective is priced as if every device in use took part in one like it at the same time, because
a mesh axis runs that way: all shifts of a group together. Whether they contend depends on what a bandwidth belongs to:

    own port         each device has its own, so shifts never meet: eight groups of one device a node each have a port
    shared uplink    the devices of a unit share links that carry less than their ports together, `oversubscription`
                     times less; with all of them active each has that share, whatever group it is in

Not modelled: a group that has a shared uplink to itself while others are silent (it is then faster than predicted),
collectives of different axes that overlap in time, and traffic of other jobs.
"""

import hashlib
import json
import math
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

from hardware_profiles.device import Device
from hardware_profiles.errors import TopologyError, UnknownKeyError
from hardware_profiles.host import Host, Store
from hardware_profiles.network import Group, Level, Span, capacity_of, check_levels
from hardware_profiles.software import PYTORCH, Software

FactKind = Literal["datasheet", "measured", "fitted", "assumed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One number of a profile: its path in the file, its value in the unit of that path, its source and its kind."""

    key: str
    value: float
    source: str
    kind: FactKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`devices` devices of one kind under a hierarchy of levels (innermost first), and the source of each number.

    `composition` says how the levels differ from those of the profile called `name` (see `hardware_profiles.compose`);
    it is empty if they do not. `software` runs on the cluster. `host` is a device's part of its host, None if the
    profile does not describe it; it is not part of the digest, because plans that offload nothing do not depend on it.
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    devices: int
    composition: str = field(default="", compare=False)
    facts: tuple[Fact, ...] = field(default=(), repr=False, compare=False)
    software: Software = PYTORCH
    host: Host | None = None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_levels(self.name, self.levels)
        object.__setattr__(self, "_hash", hash((self.name, self.device, self.levels, self.devices, self.software)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.init}
        return partial(Cluster, **values), ()  # as in Group

    @property
    def devices_per_node(self) -> int | None:
        """Fan-out of the innermost level (None: unbounded)."""
        return self.levels[0].fan_out

    def with_devices(self, devices: int) -> "Cluster":
        """The same cluster with `devices` in use: any number that fits one node, or whole nodes.

        Raises `TopologyError` otherwise; the message has the nearest legal numbers, or the capacity.
        """
        if devices < 1:
            raise TopologyError(f"cluster {self.name} needs at least 1 device, got {devices}")
        node = self.devices_per_node
        if node is not None and devices > node and devices % node:
            below = devices // node * node
            raise TopologyError(
                f"{devices} devices do not fill whole nodes of {node} devices (cluster {self.name}); the nearest "
                f"legal numbers are {below} and {below + node}{self._other_nodes(devices)}"
            )
        capacity = capacity_of(self.levels)
        if capacity is not None and devices > capacity:
            raise TopologyError(f"cluster {self.name} holds at most {capacity} devices, got {devices}")
        return replace(self, devices=devices)

    def _other_nodes(self, devices: int) -> str:
        """How to ask for the largest nodes that so many devices fill; empty where only nodes of one device are."""
        size = max(size for size in range(1, self.levels[0].fan_out or 1) if devices % size == 0)
        outer = (one.name if one.fan_out is None else f"{one.name}={one.fan_out}" for one in self.levels[1:])
        levels = ",".join([f"{self.levels[0].name}={size}", *outer])
        return f"; nodes of another size are asked for as in plan --cluster {levels}" if size > 1 else ""

    def with_software(self, software: Software) -> "Cluster":
        """The same machines with other software."""
        return replace(self, software=software)

    def store(self, home: str) -> Store:
        """The offload target called `home`, "host" or "disk". Raises `UnknownKeyError` if the profile does not describe
        it."""
        if self.host is None:
            raise UnknownKeyError(
                f"profile {self.name} says nothing of the host beside its devices; add a section [host] to it"
            )
        try:
            return self.host.store(home)
        except UnknownKeyError as error:
            raise UnknownKeyError(f"profile {self.name}: {error}") from error

    def group(self, size: int, stride: int) -> Group:
        """The group of devices 0, stride, 2*stride, ... (`size` of them), as every shift of it sees the hierarchy.

        Members count at the innermost level where they share a unit. A size or stride that does not divide the fan-out
        of a level counts at the next outer one, which is never too fast. Raises `TopologyError` if the group reaches
        beyond the devices in use.
        """
        return _group(self, size, stride)

    def digest(self) -> str:
        """sha256 over name, device and levels; without the number of devices, the software, the host and the
        sources."""
        content = {
            "name": self.name,
            "device": _plain(self.device),
            "levels": [_plain(level) for level in self.levels],
        }
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@lru_cache(maxsize=4096)
def _group(cluster: Cluster, size: int, stride: int) -> Group:
    if size < 1 or stride < 1:
        raise TopologyError(f"a group needs size >= 1 and stride >= 1, got size {size} and stride {stride}")
    last = (size - 1) * stride
    if last >= cluster.devices:
        raise TopologyError(
            f"group of size {size} and stride {stride} reaches device {last}, but cluster {cluster.name} "
            f"has {cluster.devices} devices in use"
        )
    spans: list[Span] = []
    remaining, step, unit = size, stride, 1  # members to place, their distance and the extent of a unit of this level
    outermost = cluster.levels[-1]
    for level in cluster.levels:
        if remaining == 1:
            break
        if level is outermost or level.fan_out is None:
            spans.append(Span(level=outermost, count=remaining))
            break
        unit *= level.fan_out
        if cluster.devices <= unit:  # all devices in use share one unit, so alignment does not matter
            spans.append(Span(level=level, count=remaining))
            break
        if step % level.fan_out == 0:
            step //= level.fan_out
            continue
        fitting = level.fan_out // step if level.fan_out % step == 0 else 1
        count = math.gcd(fitting, remaining)  # blocks of this many members share a unit, whatever the shift
        if count > 1:
            spans.append(Span(level=level, count=count))
        remaining //= count
        if remaining > 1 and count * step != level.fan_out:  # ragged: what is left may cross any level
            spans.append(Span(level=outermost, count=remaining))
            break
        step = 1
    return Group(spans=tuple(spans))


def _plain(value: Any) -> Any:
    """Dataclasses as dicts, so that two equal values have the same text.

    Derived fields are left out. So are fields with metadata (`OPTIONAL_IN_DIGEST`) at their defaults: a profile that
    does not use them keeps its digest.
    """
    if is_dataclass(value):
        values = {item: getattr(value, item.name) for item in fields(value) if item.init}
        return {item.name: _plain(one) for item, one in values.items() if not (item.metadata and one == item.default)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
