"""What stands beside the devices of a node: the memory of its host, the link to it, and its disks.

    device ══ link ══ host memory ══ disk        bytes and bytes/s of one device, while all devices of a host do alike

A profile says what a whole host has; here that is shared out. Devices behind one uplink (a PCIe switch) have their part
of it each, because a training step moves the state of all devices at the same time.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from hardware_profiles.errors import UnknownKeyError
from hardware_profiles.units import Bytes, BytesPerSecond

Home: TypeAlias = Literal["device", "host", "disk"]
"""Where something is kept while nothing computes with it."""

HOMES: tuple[str, ...] = get_args(Home)


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Room that one device has outside of itself, and how quickly it `read`s from there and `write`s to there."""

    capacity: Bytes
    read: BytesPerSecond
    write: BytesPerSecond


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One device's part of its host.

    `memory` is that of the host over its devices, `link` what a device has of its uplink in each direction while all
    devices that share it transfer. `bandwidth` is its part of that of the memory, reading and writing counted, None
    where the profile does not say it. `disk` has the part of the disks, as they read and write by themselves; None
    where the profile says nothing of any.
    """

    memory: Bytes
    link: BytesPerSecond
    disk: Store | None = None
    bandwidth: BytesPerSecond | None = None

    @property
    def memory_rate(self) -> BytesPerSecond:
        """Bytes/s at which the host moves what it looks up in its memory; where the profile does not say it, those of
        the link, which memory is hardly slower than."""
        return self.link if self.bandwidth is None else self.bandwidth

    def store(self, home: str) -> Store:
        """The store of that name, "host" or "disk", as a device reaches it: what comes from a disk comes through the
        memory of the host and over its link, in pieces, so that the slower of the two sets the pace. Raises
        `UnknownKeyError` for a disk that the profile does not describe, and for another word."""
        if home == "host":
            return Store(capacity=self.memory, read=self.link, write=self.link)
        if home != "disk":
            raise UnknownKeyError(f"no store {home!r}; known: host, disk")
        if self.disk is None:
            raise UnknownKeyError("it says nothing of a disk; add [host.disk] to it, or keep it on the host")
        read, write = min(self.disk.read, self.link), min(self.disk.write, self.link)
        return Store(capacity=self.disk.capacity, read=read, write=write)
