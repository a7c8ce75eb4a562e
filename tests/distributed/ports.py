"""Ports for processes that are told where to meet before they start."""

import random
import socket
from pathlib import Path

_HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port that nobody listens on, below those that the system hands out: connections of other tests get one of
    those, also in the seconds until the process that is told of this one listens."""
    lowest = int(_HANDED_OUT.read_text().split()[0]) if _HANDED_OUT.exists() else 32768
    for port in random.SystemRandom().sample(range(lowest // 2, lowest), 100):
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no free port from {lowest // 2} to {lowest}")
