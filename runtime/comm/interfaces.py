"""The network interfaces of this machine and their addresses, as the operating system lists them (getifaddrs).

    lo    127.0.0.1, ::1           the loopback interface: only this machine reaches what listens there
    eth0  10.0.0.7, fe80::1

The user names an interface by its name, one of its addresses, or its network.
"""

import ctypes
import ipaddress
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from planner.errors import RequestError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One address of a network interface."""

    name: str
    address: Address


class _IfAddrs(ctypes.Structure):
    """The fields of `struct ifaddrs` that are read here."""


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def interfaces() -> tuple[Interface, ...]:
    """Every address of every interface, IPv4 before IPv6, without link-local ones (fe80::)."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "getifaddrs")
    try:
        found = [Interface(name=name, address=address) for name, address in _listed(first)]
    finally:
        libc.freeifaddrs(first)
    return tuple(sorted(found, key=lambda one: one.address.version))


def _listed(entry: "ctypes._Pointer[_IfAddrs]") -> Iterator[tuple[str, Address]]:
    while bool(entry):  # a null pointer is false
        content = entry.contents
        if content.address is not None and (address := _address(content.address)) is not None:
            yield content.name.decode(), address
        entry = content.next


def _address(place: int) -> Address | None:
    """The address in a `struct sockaddr`: on Linux it begins with two bytes of family, on BSD and macOS with a length
    and one byte of family. None for other families and for link-local addresses."""
    head = ctypes.string_at(place, 2)
    family = head[1] if sys.platform != "linux" else int.from_bytes(head, sys.byteorder)
    if family == socket.AF_INET:
        return ipaddress.IPv4Address(ctypes.string_at(place + 4, 4))
    if family == socket.AF_INET6:
        found = ipaddress.IPv6Address(ctypes.string_at(place + 8, 16))
        return None if found.is_link_local else found
    return None


def loopback() -> Interface:
    """The loopback interface, which no other machine reaches. Raises RequestError where none is up."""
    found = next((one for one in interfaces() if one.address.is_loopback), None)
    if found is None:
        raise RequestError("this machine has no loopback interface, on which its processes could meet; set lo up")
    return found


def interface_of(text: str) -> Interface:
    """The interface with this name (`eth0`), with this address (`10.0.0.7`), or with an address in this network
    (`10.0.0.0/24`), which can be the same setting on all hosts of a job. Raises RequestError where there is none."""
    there = interfaces()
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        found = [one for one in there if one.name == text]
    else:
        found = [one for one in there if one.address in network]
    if not found:
        known = ", ".join(f"{one.name} ({one.address})" for one in there)
        raise RequestError(
            f"--listen {text}: this machine has {known or 'no interface that is up'}; give the name of an interface,"
            " one of its addresses, or its network, such as 10.0.0.0/24"
        )
    return found[0]
