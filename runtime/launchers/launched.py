"""One process of a job, as its launcher describes it in environment variables."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from planner.errors import RequestError

Environment = Mapping[str, str]

LOOPBACK = "127.0.0.1"
_FIRST_PORT, _PORTS = 15000, 15000  # below the ports that operating systems assign automatically (32768 on Linux)

_DIGITS = 12  # of a number in a variable


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """Process `rank` of `world`, `local_rank` of the `local_world` on its host. The processes meet at `address` and
    `port`, where the first one listens, or in the file `store`. `launcher` is the source of these values, `agents` the
    number of processes that launch them (torchrun's agents; 1 elsewhere); with `agent` an agent hosts the store."""

    launcher: str
    rank: int
    world: int
    local_rank: int
    local_world: int | None
    hosts: int | None
    address: str
    port: int
    agents: int = 1
    agent: bool = False
    store: str | None = None

    @property
    def on_one_host(self) -> bool:
        """Whether all processes are known to be on this host, so that no other host has to reach them."""
        return self.local_world == self.world or is_loopback(self.address)

    @property
    def one_environment(self) -> bool:
        """Whether all processes of a host were started with one environment, and so see the same devices; Slurm and
        others may show each process only its own."""
        return self.agent or self.store is not None

    def environment(self) -> dict[str, str]:
        """The variables that torch.distributed reads."""
        found = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world,
            "LOCAL_RANK": self.local_rank,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
        }
        if self.local_world is not None:
            found["LOCAL_WORLD_SIZE"] = self.local_world
        return {name: str(value) for name, value in found.items()}

    def text(self) -> str:
        """A one-line description."""
        hosts = "" if self.hosts is None else f" on {self.hosts} host{'' if self.hosts == 1 else 's'}"
        processes = f"{self.world} process{'' if self.world == 1 else 'es'}"
        return f"started by {self.launcher}: {processes}{hosts}, which meet at {self.address}:{self.port}"

    def check(self, devices: int) -> None:
        """Raise RequestError unless the job has one process for each of a plan's `devices`."""
        if self.world != devices:
            raise RequestError(
                f"the plan is for {devices} devices, and {self.launcher} started {self.world}"
                f" process{'' if self.world == 1 else 'es'}; start {devices}, or plan for {self.world}"
            )


def is_loopback(address: str) -> bool:
    """Whether an address or a name is a loopback one, which only this machine reaches."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def whole_number(environment: Environment, name: str, launcher: str, least: int = 0) -> int:
    """A required variable. Raises RequestError where it is missing or is not a whole number."""
    text = environment.get(name, "").strip()
    if not text:
        raise RequestError(f"{launcher} starts this process, but {name} is not set; set it for every process")
    if not text.isdecimal() or len(text) > _DIGITS or int(text) < least:
        raise RequestError(f"{name}={text:.40}: {launcher} writes a whole number there, {least} or more")
    return int(text)


def rank_in(environment: Environment, name: str, world: int, launcher: str) -> int:
    """The rank in a variable. Raises RequestError where it is not a rank of this `world`."""
    rank = whole_number(environment, name, launcher)
    if rank >= world:
        raise RequestError(f"{name}={rank}, and {launcher} counts {world} processes: ranks go from 0 to {world - 1}")
    return rank


def meeting_point(environment: Environment, first_host: str, job: int) -> tuple[str, int]:
    """Address and port of the first process: MASTER_ADDR and MASTER_PORT where they are set, else its host and a port
    that depends on the job number, so that all processes of a job find the same port and different jobs rarely share
    one."""
    port = environment.get("MASTER_PORT", "").strip()
    if port and (not port.isdecimal() or len(port) > _DIGITS or not 0 < int(port) < 2**16):
        raise RequestError(f"MASTER_PORT={port:.40}: give the number of a port, 1 to 65535")
    return environment.get("MASTER_ADDR") or first_host, int(port) if port else _FIRST_PORT + job % _PORTS


def digits(text: str) -> int:
    """The number in the last digits of a text, 0 without any."""
    return int("".join(filter(str.isdecimal, text))[-_DIGITS:] or "0")
