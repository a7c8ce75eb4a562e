"""Where the processes of a run find each other, and on which network interface they listen.

    started by plan run            a file that only its owner can read: no port
    started by torchrun            the store of its agent; every attempt uses its own part of it
    started by others              a store of rank 0, on a socket that is bound here

A store maps names to bytes: addresses of processes, barriers. Nothing of it is unpickled here. A TCPStore on its own
listens on all addresses, so its socket is created here and passed to it. Collectives have separate sockets: environment
variables tell gloo, NCCL and HCCL the interface.

    all processes on this host     loopback
    on several hosts               `--listen`; without it the libraries choose, and the store listens on the address in
                                   MASTER_ADDR, or on all addresses where that is a name
"""

import errno
import ipaddress
import os
import socket

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from planner.errors import RequestError
from runtime.comm.attempt import agreed_attempt
from runtime.comm.interfaces import Interface, interface_of, loopback
from runtime.launchers import Launched

_EVERYWHERE = ""  # all addresses of this machine
_BACKLOG = 4096  # processes that connect at once


def interface_for(launched: Launched, listen: str | None) -> Interface | None:
    """The interface on which a process listens: the requested one, or loopback where all processes are on this host.
    None where the libraries choose. Raises RequestError where this machine has no such interface."""
    if listen is not None:
        return interface_of(listen)
    return loopback() if launched.on_one_host else None


def variables_of(interface: Interface) -> dict[str, str]:
    """The environment variables that bind the sockets of collectives to an interface."""
    return {
        "GLOO_SOCKET_IFNAME": interface.name,
        "NCCL_SOCKET_IFNAME": f"={interface.name}",  # exactly this name, not every name with this prefix
        "HCCL_IF_IP": str(interface.address),
    }


def store_of(launched: Launched, interface: Interface | None) -> Store:
    """The store in which the processes of a job find each other. Raises RequestError where the port of the first
    process is taken."""
    if launched.store is not None:
        store: Store = FileStore(launched.store, launched.world)
        store.set_timeout(default_pg_timeout)
        return store
    if launched.agent:
        return _store_of_agent(launched)
    address = launched.address if interface is None or not launched.on_one_host else str(interface.address)
    if launched.rank:
        return TCPStore(address, launched.port, launched.world, is_master=False, timeout=default_pg_timeout)
    return _own_store(launched, _listening(address, launched.port, interface))


def _store_of_agent(launched: Launched) -> Store:
    """The part of the agents' store that belongs to this attempt: torchrun keeps the store, with the addresses of dead
    processes in it. A single agent counts its attempts. Several agents count separately, so their processes agree on a
    name (`runtime.comm.attempt`)."""
    store: Store
    store, _, _ = next(rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if launched.agents > 1:
        return PrefixStore(f"attempt-{agreed_attempt(store, launched.rank, launched.world)}", store)
    return store if attempt == "0" else PrefixStore(f"attempt-{attempt}", store)


def _own_store(launched: Launched, listening: socket.socket) -> Store:
    bound = listening.getsockname()[0]
    return TCPStore(
        launched.address if ipaddress.ip_address(bound).is_unspecified else bound,
        launched.port,
        launched.world,
        is_master=True,
        timeout=default_pg_timeout,
        master_listen_fd=listening.detach(),  # the store closes it
    )


def _listening(address: str, port: int, interface: Interface | None) -> socket.socket:
    """The socket of rank 0: on the interface, else on `address` if that is one of this machine, else on all."""
    if interface is not None:
        wanted = [str(interface.address)]
    else:
        wanted = [*([address] if _is_number(address) else []), _EVERYWHERE]
    for host in wanted:
        try:
            return _bound(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise RequestError(
                    f"port {port} of MASTER_PORT is in use on this machine; set MASTER_PORT to another, or let"
                    " torchrun choose one: --rdzv-backend c10d --rdzv-endpoint HOST:0"
                ) from error
            if host == wanted[-1]:
                raise
    raise AssertionError("there is a last one")


def _is_number(address: str) -> bool:
    """Whether it is a numeric address. A name may resolve to different addresses on different hosts."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def _bound(host: str, port: int) -> socket.socket:
    if host == _EVERYWHERE and socket.has_dualstack_ipv6():
        return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)
