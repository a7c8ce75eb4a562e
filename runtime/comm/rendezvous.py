"""Where the processes of a run find each other, and on which network interface they listen.

    started by plan run            a file that only its owner can read: no port
    started by torchrun            the store of its agent, of which every attempt has its own part
    started by others              a store of rank 0, on a socket that is bound here

A store keeps bytes under names: addresses of processes, barriers. Nothing of it is unpickled here, but a TCPStore
listens on all addresses by itself, so that its socket is made here and handed to it. Collectives have sockets of their
own: gloo, NCCL and HCCL are told the interface by variables.

    all processes on this host     loopback
    on several                     `--listen`; without it what the libraries choose, and a store on the address that
                                   MASTER_ADDR is, or on all where it is a name
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
_BACKLOG = 4096  # processes that come at once


def interface_for(launched: Launched, listen: str | None) -> Interface | None:
    """The interface on which a process listens: the one that is asked for, or loopback where no other host takes part.
    None where the libraries choose. Raises RequestError where this machine has none such."""
    if listen is not None:
        return interface_of(listen)
    return loopback() if launched.on_one_host else None


def variables_of(interface: Interface) -> dict[str, str]:
    """What binds the sockets of collectives to an interface."""
    return {
        "GLOO_SOCKET_IFNAME": interface.name,
        "NCCL_SOCKET_IFNAME": f"={interface.name}",  # this name, not all that begin so
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
    """The part of the agents' store that belongs to this attempt: torchrun keeps the store in which the processes that
    have died left their addresses. One agent counts its attempts; several count each its own, so that their processes
    agree on one (`runtime.comm.attempt`)."""
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
    """The socket of rank 0: on the interface, else on `address` where that is one of this machine, else on all."""
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
    """Whether it is an address itself. A name may be another address for other hosts than for this one."""
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
