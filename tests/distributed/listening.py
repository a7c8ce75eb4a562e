"""The sockets on which processes listen, as the kernel lists them."""

import contextlib
import ipaddress
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_LISTENS, _UNCONNECTED = "0A", "07"
_STATES = {"tcp": _LISTENS, "tcp6": _LISTENS, "udp": _UNCONNECTED, "udp6": _UNCONNECTED}


@dataclass(frozen=True, kw_only=True, order=True)
class Listening:
    """A socket that takes what comes from outside of its process."""

    kind: str
    address: str
    port: int

    @property
    def on_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def listening(processes: Iterable[int]) -> set[Listening]:
    """Those of some processes: the sockets among their open files that /proc/net lists as listening."""
    own = {name for process in processes for name in _sockets(process)}
    found = set()
    for kind, state in _STATES.items():
        for line in Path(f"/proc/net/{kind}").read_text(encoding="utf-8").splitlines()[1:]:
            words = line.split()
            if words[3] == state and words[9] in own:
                address, _, port = words[1].partition(":")
                found.add(Listening(kind=kind, address=_address(address), port=int(port, 16)))
    return found


def _sockets(process: int) -> set[str]:
    """The inodes of the sockets that a process has open."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{process}/fd/{entry}")
                if target.startswith("socket:["):
                    found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found


def _address(text: str) -> str:
    """/proc writes words of four bytes as numbers of this machine: the lowest byte first."""
    raw = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    address = ipaddress.ip_address(raw)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def marked(start: str) -> dict[int, str]:
    """The processes whose mark starts so, and their marks."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                for word in (entry / "environ").read_bytes().split(b"\0"):
                    if word.startswith(f"MARK={start}".encode()):
                        found[int(entry.name)] = word.decode().removeprefix("MARK=")
    return found


@contextlib.contextmanager
def listening_meanwhile(mark: str) -> Iterator[set[Listening]]:
    """All sockets on which processes with this mark ever listen while this context is open."""
    found: set[Listening] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            found.update(listening(marked(mark)))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
