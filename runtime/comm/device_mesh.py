"""The mesh of a plan on real processes: the device of this rank, its coordinate, and its peers on each axis.

    plan mesh 2x4:   rank 6 = coordinate (1, 2)
    axis 0 (stride 4): talks to rank 2            axis 1 (stride 1): talks to ranks 4, 5, 7

The device is the accelerator that torch finds, else the CPU; the backend (gloo, nccl, hccl, ...) is the one that torch
has registered for that device type. Nothing here names a vendor.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hardware_profiles import Seconds
from planner.errors import RequestError
from planner.sharding.mesh import Mesh
from runtime.comm.exchange import rank_number, world
from runtime.comm.rendezvous import interface_for, store_of, variables_of
from runtime.launchers import launched_by


@dataclass(frozen=True, kw_only=True)
class RankMesh:
    """The mesh of one pipeline stage as one rank sees it.

    `rank` counts inside the stage. `groups` has, per axis, the processes of the stage that differ from this one only on
    that axis; None for an axis of size 1, which never communicates.
    """

    mesh: Mesh
    rank: int
    device: torch.device
    groups: tuple[dist.ProcessGroup | None, ...]
    stage: int
    stages: int
    known: "Communicators"

    @cached_property
    def coordinate(self) -> tuple[int, ...]:
        """Position of this rank on each axis."""
        return self.mesh.coordinate(self.rank)

    def group(self, axis: int) -> dist.ProcessGroup:
        """The process group of an axis of size 2 or more."""
        group = self.groups[axis]
        assert group is not None, f"axis {axis} has one device, nothing moves along it"
        return group


def current_device(local_rank: int = 0) -> torch.device:
    """The device of the process with this number on its node; the only one where a launcher shows each process its own
    device (`srun --gpus-per-task 1`). Raises RequestError where there are fewer accelerators than processes; processes
    on a CPU share it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    launched = launched_by(os.environ)
    if count == 1 and launched is not None and not launched.one_environment:
        return torch.device(accelerator.type, 0)
    if local_rank >= count:
        raise RequestError(
            f"process {local_rank} of this machine has no device: there are {count} of type {accelerator.type}, one for"
            " each process; start the others on more nodes with torchrun --nnodes ... --nproc-per-node ... -m runtime"
            " PLAN, or plan for fewer devices"
        )
    return torch.device(accelerator.type, local_rank)


def start_processes(device: torch.device, timeout: Seconds | None = None, listen: str | None = None) -> Store:
    """Join the default process group that the environment describes (`runtime.launchers`), with the backend of the
    device, and return its store. A collective that waits longer than `collective_timeout(timeout)` raises. `listen` is
    the interface of this machine for all sockets (`runtime.comm.rendezvous`). Raises RequestError where there is no
    such interface, or the port of the first process is taken."""
    launched = launched_by(os.environ)
    assert launched is not None, "somebody has started this process as one of several"
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    backend = dist.get_default_backend_for_device(device)
    interface = interface_for(launched, listen)
    if interface is not None:
        os.environ.update(variables_of(interface))
    store = store_of(launched, interface)
    limit = collective_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=launched.rank, world_size=launched.world, timeout=limit)
    return store


def collective_timeout(timeout: Seconds | None) -> timedelta | None:
    """The timeout of collectives in a run that is ended after `timeout` seconds without progress: a minute longer, so
    that the watching process can first say why it ends the run. Torch's default where there is no limit."""
    return None if timeout is None else timedelta(seconds=timeout + 60)


def join_processes(device: torch.device, listen: str | None = None) -> None:
    """`start_processes`, where a launcher started this process and it has not joined yet. The device becomes the
    current one in any case, because a program that has joined itself may have chosen none. Raises RequestError where
    the launcher's variables are incomplete."""
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device)
    if not dist.is_initialized() and (launched := launched_by(os.environ)) is not None:
        os.environ.update(launched.environment())
        start_processes(device, listen=listen)


def local_rank() -> int:
    """Number of this process on its node; 0 where no launcher says otherwise."""
    launched = launched_by(os.environ)
    return 0 if launched is None else launched.local_rank


class Communicators:
    """Process groups of this process, each made once and cached: equal ranks and purpose give the same communicator.
    Collectives time out as `timeout` says (`collective_timeout`)."""

    def __init__(self, timeout: Seconds | None = None) -> None:
        self._timeout = collective_timeout(timeout)
        self._known: dict[tuple[str, tuple[tuple[int, ...], ...]], dist.ProcessGroup] = {}

    def of(self, parts: Sequence[Sequence[int]], purpose: str = "") -> dist.ProcessGroup:
        """The group that has this rank, among several disjoint lists of ranks (a rank that is in none gets some group
        that it must not use). Collective: every rank of the default group calls it, in the same order."""
        key = (purpose, tuple(tuple(part) for part in parts))
        if key not in self._known:
            groups: list[dist.ProcessGroup] = [dist.new_group(list(part), timeout=self._timeout) for part in parts]
            own = [group for group, part in zip(groups, parts, strict=True) if dist.get_rank() in part]
            self._known[key] = own[0] if own else groups[0]
        return self._known[key]


def rank_mesh(mesh: Mesh, device: torch.device, stages: int = 1, known: Communicators | None = None) -> RankMesh:
    """The process groups of every axis, in each of `stages` equal stages. Collective: all ranks must call it, in the
    same order; `known` are the existing groups.

    One device needs no process group. Raises RequestError where the number of processes is not that of the plan.
    """
    processes = world()
    wanted = mesh.size * stages
    if processes != wanted:
        shape = "x".join(map(str, mesh.sizes)) or "1"
        alone = not dist.is_initialized() and launched_by(os.environ) is None
        unknown = " (by torchrun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set in each)" if alone else ""
        raise RequestError(
            f"the plan is for {wanted} devices ({f'{stages} stages, ' if stages > 1 else ''}mesh {shape}), and"
            f" {processes} process{' runs' if processes == 1 else 'es run'}; start {wanted}{unknown}, or plan for"
            f" {processes}"
        )
    known = known or Communicators()
    groups = tuple(known.of(_lines(mesh, axis, stages)) if size > 1 else None for axis, size in enumerate(mesh.sizes))
    stage, rank = divmod(rank_number(), mesh.size)
    return RankMesh(mesh=mesh, rank=rank, device=device, groups=groups, stage=stage, stages=stages, known=known)


def _lines(mesh: Mesh, axis: int, stages: int) -> list[list[int]]:
    """All lists of ranks that differ only on this axis, in every stage."""
    line = mesh.axes[axis]
    starts = [rank for rank in range(mesh.size * stages) if rank // line.stride % line.size == 0]
    return [list(line.line(start)) for start in starts]


def axis_lines(place: RankMesh, purpose: str) -> tuple[dist.ProcessGroup | None, ...]:
    """Process groups of every axis for a separate purpose, beside `place.groups`. Collective: every rank of every stage
    calls it, in the same order."""
    mesh = place.mesh
    return tuple(
        place.known.of(_lines(mesh, axis, place.stages), purpose) if size > 1 else None
        for axis, size in enumerate(mesh.sizes)
    )


def stage_line(place: RankMesh, stages: tuple[int, ...], purpose: str) -> dist.ProcessGroup:
    """The processes at the same place inside each of these stages. Collective: every rank of every stage calls it, in
    the same order; a rank of another stage must not use its result."""
    size = place.mesh.size
    return place.known.of([[stage * size + rank for stage in stages] for rank in range(size)], purpose)
