"""A machine as plain values: a device, and the hierarchy of networks between many of them.

    level 1 "cluster"   [ node ]----[ node ]----[ node ] ...      fan_out None: unbounded
                          |
    level 0 "node"      d0 d1 d2 d3 d4 d5 d6 d7                   fan_out 8

Devices are numbered innermost level first: device 9 above is d1 of the second node. Every level gives its bandwidth per
device and direction, so a node of eight devices reaches the cluster network with eight times the figure of that level.

Groups that communicate at once. A collective is priced as if every device in use took part in one like it at the same
time, because that is how a mesh axis runs: all shifts of a group together. Whether they contend is settled by what a
bandwidth belongs to:

    own port         each device has its own, so shifts never meet: eight groups of one device a node each have a port
    shared uplink    the devices of a unit share links that carry less than their ports together, `oversubscription`
                     times less; with all of them active each has that share, whatever group it is in

Not modelled: a group that has a shared uplink to itself while others are silent (it is then faster than we say),
collectives of different axes that overlap in time, and traffic of other jobs.
"""

import hashlib
import json
import math
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

from hardware_profiles.errors import TopologyError, UnknownKeyError
from hardware_profiles.host import Host, Store
from hardware_profiles.kernels import AttentionKernel, MatmulKernel
from hardware_profiles.software import PYTORCH, AttentionKernels, Software
from hardware_profiles.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds

FactKind = Literal["datasheet", "measured", "fitted", "assumed"]
DeviceType = Literal["cuda", "npu", "cpu"]
NetworkKind = Literal["switch", "mesh"]
Serves = Literal["all", "rings", "peers"]

OP_CLASSES: tuple[str, ...] = (
    "attention",
    "copy",
    "cross_entropy",
    "elementwise",
    "embedding",
    "matmul",
    "normalisation",
    "optimizer",
)
"""Classes of kernels that a profile gives an efficiency for. The class "view" costs nothing and is in no profile."""


_LATER = {"left out of digests at its default": True}  # a field that is younger than plans that hold digests


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One number of a profile as it was published: its path in the file, value in the unit of that path, and source."""

    key: str
    value: float
    source: str
    kind: FactKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Achieved share of the peak, in (0, 1], of large kernels of one op class."""

    compute: float
    bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one process on a CPU.

    A kernel costs at least `launch_latency`, and an operator that a framework launches one by one what its host needs
    for that, `host_latency`. Of `memory`, `reserved` is never available to tensors (driver context,
    communication buffers), and `allocator_slack` is the share by which the allocator holds more than it hands out.
    `compute_units` is the number of parts that work on one tile of a kernel each (SMs of a GPU, cores of an NPU).
    `matmul_kernels` and `attention_kernels` name dtypes; None says that the class efficiency is all there is.
    `generations` says how many times longer older attention kernels take than those; `misaligned` how many times longer
    a 16-bit matrix product takes whose rows are no multiples of 16 bytes.
    """

    name: str
    device_type: DeviceType
    memory: Bytes
    reserved: Bytes
    allocator_slack: float
    memory_bandwidth: BytesPerSecond
    launch_latency: Seconds
    peak_flops: tuple[tuple[str, FlopsPerSecond], ...]
    efficiencies: tuple[tuple[str, Efficiency], ...]
    compute_units: int
    matmul_kernels: tuple[tuple[str, MatmulKernel | None], ...]
    attention_kernels: tuple[tuple[str, AttentionKernel | None], ...]
    host_latency: Seconds = field(default=0.0, metadata=_LATER)
    misaligned: float = field(default=1.0, metadata=_LATER)
    generations: tuple[tuple[AttentionKernels, float], ...] = field(default=(), metadata=_LATER)

    def peak(self, dtype: str) -> FlopsPerSecond:
        """Dense peak for a dtype ("bf16", "fp32", ...); raises `UnknownKeyError` for one that has no figure."""
        for name, value in self.peak_flops:
            if name == dtype:
                return value
        known = ", ".join(name for name, _ in self.peak_flops)
        raise UnknownKeyError(f"device {self.name} has no peak FLOP/s for dtype {dtype!r}; it has {known}")

    def efficiency(self, op_class: str) -> Efficiency:
        """Efficiency of an op class; raises `UnknownKeyError` for one that has no figure."""
        for name, value in self.efficiencies:
            if name == op_class:
                return value
        known = ", ".join(name for name, _ in self.efficiencies)
        raise UnknownKeyError(f"device {self.name} has no efficiency for op class {op_class!r}; it has {known}")

    def matmul_kernel(self, dtype: str) -> MatmulKernel | None:
        """How it multiplies matrices of a dtype; None: by class efficiency. Raises `UnknownKeyError` if unknown."""
        for name, kernel in self.matmul_kernels:
            if name == dtype:
                return kernel
        known = ", ".join(name for name, _ in self.matmul_kernels)
        raise UnknownKeyError(
            f"device {self.name} does not say how it multiplies matrices of {dtype!r}; it has {known}"
        )

    def attention_kernel(self, dtype: str) -> AttentionKernel | None:
        """How it computes attention in a dtype; None: by class efficiency. Raises `UnknownKeyError` if unknown."""
        for name, kernel in self.attention_kernels:
            if name == dtype:
                return kernel
        known = ", ".join(name for name, _ in self.attention_kernels)
        raise UnknownKeyError(f"device {self.name} does not say how it computes attention in {dtype!r}; it has {known}")

    def attention_slowdown(self, kernels: AttentionKernels) -> float:
        """How many times longer than its best ones these kernels take; raises `UnknownKeyError` if unknown."""
        if kernels == "best":
            return 1.0
        for name, value in self.generations:
            if name == kernels:
                return value
        known = ", ".join(("best", "unfused", *(name for name, _ in self.generations)))
        raise UnknownKeyError(f"device {self.name} has no figure for attention by {kernels}; it has {known}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """One way in which a communication library drives a level: little latency, or much bandwidth.

    `setup` is paid once per collective whose outermost level this is, `latency` once per step over this level, and
    `efficiency` is the share of the level's bandwidth that large messages reach. `own` is what the part that a device
    keeps seems to cost it, relative to sending that part (a fitted term in 1/n, see `costmodels.collectives`). Some
    libraries send between `peers` (all-to-all, neighbours) by other kernels than along `rings` and trees.
    """

    name: str
    setup: Seconds
    latency: Seconds
    efficiency: float
    own: float = field(default=0.0, metadata=_LATER)
    serves: Serves = field(default="all", metadata=_LATER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the network hierarchy.

    `fan_out` units of the level below form one unit of this one (None: as many as there are, outermost level only).
    `bandwidth` is per device and direction. In a "switch" any subset of devices has all of it; in a "mesh" of direct
    links a group of c devices has only (c-1)/(fan_out-1) of it. All levels of a cluster list the same protocols, in the
    same order. `in_network` is the protocol of an all-reduce done by the switches themselves (NVLink SHARP), if any.
    `oversubscription` is how many times more the ports of a unit's devices carry together than its uplink here.
    """

    name: str
    fan_out: int | None
    network: NetworkKind
    bandwidth: BytesPerSecond
    protocols: tuple[Protocol, ...]
    in_network: Protocol | None = None
    oversubscription: float = field(default=1.0, metadata=_LATER)

    @property
    def latency(self) -> Seconds:
        """Least latency of a step over this level."""
        return min(protocol.latency for protocol in self.protocols)

    @property
    def efficiency(self) -> float:
        """Share of the bandwidth that the best protocol reaches."""
        return max(protocol.efficiency for protocol in self.protocols)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What a group has at one level: `count` units of the level below, joined by `level`."""

    level: Level
    count: int

    @property
    def bandwidth(self) -> BytesPerSecond:
        """Bandwidth per device and direction that a group of `count` has while all shifts of it communicate.

        All of a switch, its links of a mesh; on a shared uplink the device's part of it.
        """
        level = self.level
        if level.network == "mesh" and level.fan_out is not None:
            return level.bandwidth * min(1.0, (self.count - 1) / (level.fan_out - 1)) / level.oversubscription
        return level.bandwidth / level.oversubscription


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The devices of a collective, as a collective sees them: spans of more than one, innermost first.

    The product of the counts is the size of the group; a group of one device has no spans.
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
        return partial(Group, spans=self.spans), ()  # hashes of text differ between processes: compute anew


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`devices` devices of one kind under a hierarchy of levels (innermost first), and where the numbers come from.

    `composition` says how the levels differ from those of the profile called `name` (see `hardware_profiles.compose`);
    empty: not at all. `software` runs on it. `host` is what a device has outside of itself, None where the profile says
    nothing of it; it is no part of the digest, because plans that offload nothing there do not depend on it.
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
        _check_levels(self.name, self.levels)
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

        Raises `TopologyError` with the nearest legal numbers otherwise.
        """
        if devices < 1:
            raise TopologyError(f"cluster {self.name} needs at least 1 device, got {devices}")
        node = self.devices_per_node
        if node is not None and devices > node and devices % node:
            below = devices // node * node
            raise TopologyError(
                f"cluster {self.name} has {node} devices a node: {devices} devices are neither within one node nor "
                f"whole nodes; the nearest legal numbers are {below} and {below + node}"
            )
        capacity = _capacity(self.levels)
        if capacity is not None and devices > capacity:
            raise TopologyError(f"cluster {self.name} holds at most {capacity} devices, got {devices}")
        return replace(self, devices=devices)

    def with_software(self, software: Software) -> "Cluster":
        """The same machines, run by other software."""
        return replace(self, software=software)

    def store(self, home: str) -> Store:
        """Where a device may offload what it does not need for now: "host" or "disk". Raises `UnknownKeyError` where
        the profile does not describe it."""
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

        Members count at the innermost level where they share a unit; a size or stride that does not divide the fan-out
        of a level is counted at the next outer one, which is never too fast. Raises `TopologyError` if the group
        reaches beyond the devices in use.
        """
        return _group(self, size, stride)

    def digest(self) -> str:
        """sha256 over the canonical content; the number of devices, the software and the sources are left out."""
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


def _capacity(levels: tuple[Level, ...]) -> int | None:
    capacity = 1
    for level in levels:
        if level.fan_out is None:
            return None
        capacity *= level.fan_out
    return capacity


def _check_levels(name: str, levels: tuple[Level, ...]) -> None:
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


def _plain(value: Any) -> Any:
    """Dataclasses to dicts, for a text that two equal values share; left out are derived
    fields, and younger ones at their defaults, so that a profile that does not use them keeps its digest."""
    if is_dataclass(value):
        values = {item: getattr(value, item.name) for item in fields(value) if item.init}
        return {item.name: _plain(one) for item, one in values.items() if not (item.metadata and one == item.default)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
