"""Identifies a process: its number alone may later be reused.

A process is identified by its kernel's boot, its PID namespace (containers have their own), its number, and its start
time in ticks since the boot (field 22 of `/proc/PID/stat`, proc(5)). Without `/proc`, the host name is used for the
boot, and `ps` gives the start time.
"""

import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_FIELDS = {"host": str, "boot": str, "namespace": str, "pid": int, "start": str}


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of some host."""

    host: str
    boot: str
    namespace: str
    pid: int
    start: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def alive(self) -> bool | None:
        """Whether it still runs; None where that cannot be seen from here: another host, another container, or an
        earlier boot."""
        if (self.host, self.boot, self.namespace) != _here():
            return None
        return _start_of(self.pid) == self.start

    def content(self) -> dict[str, Any]:
        """The form that `process_from` reads."""
        return asdict(self)


def this_process() -> Process:
    """This process."""
    return process_of(os.getpid())


def process_of(pid: int) -> Process:
    """A process of this host by its number."""
    host, boot, namespace = _here()
    return Process(host=host, boot=boot, namespace=namespace, pid=pid, start=_start_of(pid) or "")


def process_from(content: Any) -> Process | None:
    """What `Process.content` has written; None for anything else."""
    if not isinstance(content, dict) or set(content) != set(_FIELDS):
        return None
    if any(type(content[name]) is not kind for name, kind in _FIELDS.items()) or content["pid"] < 1:
        return None
    host, boot, namespace, start = (content[name][:200] for name in ("host", "boot", "namespace", "start"))
    if not (host + boot + namespace + start).isprintable():
        return None  # the text is shown to users
    return Process(host=host, boot=boot, namespace=namespace, pid=content["pid"], start=start)


def _here() -> tuple[str, str, str]:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = namespace = ""
    return os.uname().nodename, boot, namespace


def _start_of(pid: int) -> str | None:
    """The start time of a process; None where there is none, or only a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None if Path("/proc/self/stat").exists() else _start_by_ps(pid)
    fields = text[text.rindex(")") + 2 :].split()  # the name of a program may have spaces and brackets
    return None if fields[0] in "ZX" else fields[19]


def _start_by_ps(pid: int) -> str | None:
    said = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return said.stdout.strip() or None
