"""The levels of a network as plain values, and how a group of devices sees them."""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from hardware_profiles.digests import OPTIONAL_IN_DIGEST
from hardware_profiles.errors import TopologyError
from hardware_profiles.units import GB, BytesPerSecond, Seconds

NetworkKind = Literal["switch", "mesh"]
Serves = Literal["all", "rings", "peers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """One way in which a communication library drives a level: with low latency, or with high bandwidth.

    Attributes:
        name: name of the protocol.
        setup: seconds once per collective whose outermost level this is.
        latency: seconds once per step over this level.
        efficiency: share of the level's bandwidth that large messages reach.
        own: cost of the part of a message that a device keeps, relative to sending that part (a fitted term in 1/n, see
            `costmodels.collectives`).
        serves: some libraries send between "peers" (all-to-all, neighbours) with other kernels than along "rings" and
            trees.
    """

    name: str
    setup: Seconds
    latency: Seconds
    efficiency: float
    own: float = field(default=0.0, metadata=OPTIONAL_IN_DIGEST)
    serves: Serves = field(default="all", metadata=OPTIONAL_IN_DIGEST)


_LEAST, _MOST = 1e3, 1e15
"""Limits of network bandwidths, bytes/s per device and direction: even a modem is faster than the least, and no memory
is as fast as the most. Anything beyond is a wrong unit."""

RATES = f"links carry {_LEAST / GB:f} to {_MOST / GB:,.0f} GB/s per device and direction"


def is_rate(bandwidth: BytesPerSecond) -> bool:
    """Whether a stated bandwidth is within the limits of links; False for NaN."""
    return _LEAST <= bandwidth <= _MOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the network hierarchy.

    Attributes:
        name: name of the level.
        fan_out: units of the level below that form one unit of this one (None: any number; outermost level only).
        network: in a "switch" any subset of devices has all of the bandwidth; in a "mesh" of direct links a group of c
            devices has only (c-1)/(fan_out-1) of it.
        bandwidth: bytes/s per device and direction.
        protocols: all levels of a cluster list the same protocols, in the same order.
        in_network: the protocol of an all-reduce that the switches compute (NVLink SHARP), if any.
        oversubscription: bandwidth of the ports of a unit's devices together, over that of the unit's uplink.
    """

    name: str
    fan_out: int | None
    network: NetworkKind
    bandwidth: BytesPerSecond
    protocols: tuple[Protocol, ...]
    in_network: Protocol | None = None
    oversubscription: float = field(default=1.0, metadata=OPTIONAL_IN_DIGEST)

    @property
    def latency(self) -> Seconds:
        """Lowest latency of a step over this level, in seconds."""
        return min(protocol.latency for protocol in self.protocols)

    @property
    def efficiency(self) -> float:
        """Share of the bandwidth that the best protocol reaches."""
        return max(protocol.efficiency for protocol in self.protocols)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A group's part at one level: `count` units of the level below, joined by `level`."""

    level: Level
    count: int

    @property
    def bandwidth(self) -> BytesPerSecond:
        """Bytes/s per device and direction that a group of `count` units has while all shifts of it communicate.

        All of a switch; the group's links of a mesh; on a shared uplink the device's share of it.
        """
        level = self.level
        if level.network == "mesh" and level.fan_out is not None:
            return level.bandwidth * min(1.0, (self.count - 1) / (level.fan_out - 1)) / level.oversubscription
        return level.bandwidth / level.oversubscription


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The devices of a collective as spans of more than one unit, innermost first.

    The product of the counts is the size of the group; a group of one device has no spans. Raises `TopologyError` for a
    span of fewer than two.
    """

    spans: tuple[Span, ...]
    size: int = field(init=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if any(span.count < 2 for span in self.spans):
            raise TopologyError(f"every span of a group counts at least 2, got {[s.count for s in self.spans]}")
        object.__setattr__(self, "size", math.prod(span.count for span in self.spans))
        object.__setattr__(self, "_hash", hash(self.spans))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Group, spans=self.spans), ()  # hashes of text differ between processes, so it is computed anew


def capacity_of(levels: tuple[Level, ...]) -> int | None:
    """The most devices that the levels hold; None if unbounded."""
    capacity = 1
    for level in levels:
        if level.fan_out is None:
            return None
        capacity *= level.fan_out
    return capacity


def check_levels(name: str, levels: tuple[Level, ...]) -> None:
    """Check that levels fit together: protocols, fan-outs, bandwidths, oversubscription.

    Raises `TopologyError` for the first fault.
    """
    if not levels:
        raise TopologyError(f"cluster {name} has no levels")
    protocols = [(protocol.name, protocol.serves) for protocol in levels[0].protocols]
    if not protocols:
        raise TopologyError(f"level {levels[0].name} of cluster {name} has no protocols")
    for served in ("rings", "peers"):
        if all(serves not in ("all", served) for _, serves in protocols):
            raise TopologyError(f"no protocol of cluster {name} serves {served}")
    for index, level in enumerate(levels):
        if level.fan_out is None and index != len(levels) - 1:
            raise TopologyError(f"level {level.name} of cluster {name} is unbounded but not the outermost")
        if level.fan_out is not None and level.fan_out < 2:
            raise TopologyError(f"level {level.name} of cluster {name} has fan_out {level.fan_out}, less than 2")
        if not level.bandwidth > 0:
            raise TopologyError(f"level {level.name} of cluster {name} has bandwidth {level.bandwidth}; it is above 0")
        if not 1 <= level.oversubscription < math.inf:
            raise TopologyError(
                f"level {level.name} of cluster {name} has oversubscription {level.oversubscription}; it is 1 or more"
            )
        if level.network == "mesh" and level.fan_out is None:
            raise TopologyError(f"level {level.name} of cluster {name} is a mesh, so it needs a fan_out")
        if [(protocol.name, protocol.serves) for protocol in level.protocols] != protocols:
            names = [protocol for protocol, _ in protocols]
            raise TopologyError(
                f"level {level.name} of cluster {name} must list the protocols {names}, serving the same"
            )
