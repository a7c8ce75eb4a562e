"""A slow network on one machine: network namespaces, each with an address of its own, joined by a switch.

    rank 0  eth0 10.88.0.1 ──tbf──┐
    rank 1  eth0 10.88.0.2 ──tbf──┼── switch (a bridge in a namespace of its own)
    rank 2  eth0 10.88.0.3 ──tbf──┘

Each end of a rank is a veth whose sending side is held to a bandwidth by a token bucket (`tc … tbf`), so that what a
process sends takes as long as it would on such a link, while its processor is free for other work. The other direction
is held by the senders. Nothing of the host's own network is touched: veths and the bridge live in the namespaces, and
end with them. Needs root, `ip` and `tc` (iproute2).
"""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

PREFIX = "plan-bench-"
INTERFACE = "eth0"
_BURST = 16 * 1024  # bytes that may go at once after a pause, without the limit: a small part of a message
_QUEUE = 64 * 2**20  # bytes that may wait for the bucket: nothing is dropped and sent again

_TCP = ("net.ipv4.tcp_congestion_control=reno", "net.ipv4.tcp_slow_start_after_idle=0")
"""A connection sends as fast as the link is, from the first byte of a message: BBR, the default of some hosts, would
pace it by what it has measured of links before, and others begin anew after every pause."""


def why_not() -> str | None:
    """Why namespaces cannot be made here; None where they can."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"there is no {program} on PATH; install iproute2"
    name = f"{PREFIX}{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip() or 'refused'}; run as root, with CAP_SYS_ADMIN and CAP_NET_ADMIN"
    try:
        _ip("-n", name, "link", "set", "lo", "up")
        _in(name, "tc", "qdisc", "add", "dev", "lo", "root", "tbf", *_bucket(1e8))
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    finally:
        _delete(name)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Namespaces by rank, and the one with the switch."""

    ranks: tuple[str, ...]
    switch: str

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """What runs a command where a rank lives."""
        return ["ip", "netns", "exec", self.ranks[rank], *command]

    def limit(self, bandwidth: float | None) -> None:
        """Hold what every rank sends to so many bytes a second; None for what the machine gives."""
        for name in self.ranks:
            subprocess.run(
                ["ip", "netns", "exec", name, "tc", "qdisc", "del", "dev", INTERFACE, "root"],
                capture_output=True,
                check=False,  # there is none at first
            )
            if bandwidth is not None:
                _in(name, "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *_bucket(bandwidth))


@contextlib.contextmanager
def network(ranks: int) -> Iterator[Network]:
    """Namespaces for so many ranks, gone when this ends, however it ends: also by Ctrl-C, SIGTERM and SIGHUP."""
    remove_orphans()
    stem = f"{PREFIX}{os.getpid()}"
    found = Network(ranks=tuple(f"{stem}-{rank}" for rank in range(ranks)), switch=f"{stem}-switch")
    with _stopped_by_signals():
        try:
            _build(found)
            yield found
        finally:
            for name in (*found.ranks, found.switch):
                _delete(name)


def remove_orphans() -> None:
    """Delete the namespaces of benchmarks that were killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for name in (line.split()[0] for line in listed.splitlines() if line.startswith(PREFIX)):
        process = name.removeprefix(PREFIX).partition("-")[0]
        if not process.isdecimal() or not os.path.exists(f"/proc/{process}"):
            _delete(name)


def _build(made: Network) -> None:
    for name in (*made.ranks, made.switch):
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", made.switch, "link", "add", "switch", "type", "bridge")
    _ip("-n", made.switch, "link", "set", "switch", "up")
    for rank, name in enumerate(made.ranks):
        port = f"port{rank}"
        _ip("-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", made.switch)
        _ip("-n", made.switch, "link", "set", port, "master", "switch", "up")
        _ip("-n", name, "addr", "add", f"10.88.0.{rank + 1}/24", "dev", INTERFACE)
        _ip("-n", name, "link", "set", INTERFACE, "up")
        for setting in _TCP:
            _in(name, "sysctl", "-w", setting)
        _in(name, "ip", "route", "change", "10.88.0.0/24", "dev", INTERFACE, "initcwnd", "200", "initrwnd", "200")


def _bucket(bandwidth: float) -> list[str]:
    return ["rate", f"{round(bandwidth * 8)}bit", "burst", str(_BURST), "limit", str(_QUEUE)]


def _delete(name: str) -> None:
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


def _in(name: str, *command: str) -> None:
    _ip("netns", "exec", name, *command)


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, which may be ignored where the process was started."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
