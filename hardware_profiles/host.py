"""Offload storage of the devices of a node: the memory of its host, the link to it, and its disks.

    device ══ link ══ host memory ══ disk        bytes and bytes/s of one device, while all devices of a host do alike

A profile describes a whole host; here each device gets its share. Devices behind one uplink (a PCIe switch) share it
equally, because a training step moves the state of all devices at the same time.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from hardware_profiles.errors import UnknownKeyError
from hardware_profiles.units import Bytes, BytesPerSecond

Home: TypeAlias = Literal["device", "host", "disk"]
"""Where a value is kept while nothing computes with it."""

HOMES: tuple[str, ...] = get_args(Home)


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Offload storage of one device: its bytes, and the bytes/s at which the device reads from it and writes to it."""

    capacity: Bytes
    read: BytesPerSecond
    write: BytesPerSecond


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One device's share of its host.

    Attributes:
        memory: bytes of the host's memory, divided by its devices.
        link: bytes/s of the device in each direction of its uplink while all devices that share it transfer.
        disk: the device's share of the disks, at their own rates; None if the profile does not describe any.
        bandwidth: the device's share of the memory bandwidth, bytes/s read and written together; None if the profile
            does not state it.
    """

    memory: Bytes
    link: BytesPerSecond
    disk: Store | None = None
    bandwidth: BytesPerSecond | None = None

    @property
    def memory_rate(self) -> BytesPerSecond:
        """Bytes/s at which the host moves data in its memory; if the profile does not state it, the rate of the
        link."""
        return self.link if self.bandwidth is None else self.bandwidth

    def store(self, home: str) -> Store:
        """The offload storage of that name, "host" or "disk", as a device reaches it.

        Data from a disk pass through the host's memory and its link in pieces, so the slower of the two sets the rate.
        Raises `UnknownKeyError` for a disk that the profile does not describe, and for another name.
        """
        if home == "host":
            return Store(capacity=self.memory, read=self.link, write=self.link)
        if home != "disk":
            raise UnknownKeyError(f"no store {home!r}; known: host, disk")
        if self.disk is None:
            raise UnknownKeyError("it says nothing of a disk; add [host.disk] to it, or keep it on the host")
        read, write = min(self.disk.read, self.link), min(self.disk.write, self.link)
        return Store(capacity=self.disk.capacity, read=read, write=write)
