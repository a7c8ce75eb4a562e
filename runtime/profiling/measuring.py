"""Measures this machine: the cases of `runtime.profiling.microbenchmarks` and collectives, with one process per rank.

    measure ──┬─ rank 0: prints a line per case, writes the measurements
              ├─ rank 1
              └─ ...            a Ctrl-C ends all of them, see `runtime.processes.ranks`

All ranks time the same case at the same time, because that is how a step runs: resources that they share (memory,
caches, cores if there are more processes than cores) are shared during the measurement. On a CPU each has cores /
processes threads, at least one, as `runtime.processes.ranks` gives the ranks of a plan. So a profile describes one rank
among that many, not the whole machine.

A case is called for some windows of fixed length after a warm-up. A window divides its whole length by its calls: with
more processes than cores, the time of a single short call would not include the time in which others run. Short kernels
of an accelerator would wait for the host, which launches them one by one; so they are queued behind a long product and
timed by the device's clock. The host's time for a launch is measured separately. The result is the median window of the
median rank. Collectives are called through `runtime.comm.collectives`, and run in all groups of neighbours at once.

    on a CPU   | product | collective | product | collective |      minus the products: what it adds to a step. Ranks do
                                                                    not arrive at the same time, threads sleep, and
                                                                    caches hold other data
    overlap    | start | products ... | wait |                      minus the products: the exposed part, because a
                                                                    collective uses the same cores or multiprocessors
"""

import argparse
import datetime
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist

from hardware_profiles import (
    CollectiveRow,
    KernelRow,
    MeasuredMachine,
    Measurements,
    OverlapRow,
    dump_measurements,
)
from hardware_profiles.device import DeviceType
from planner.errors import RequestError
from planner.plan.plan import PLANNER_VERSION
from planner.plan.writing import write_atomically
from runtime.comm.collectives import (
    Collective,
    all_gather,
    all_reduce,
    all_to_all,
    coalesced_all_gather,
    coalesced_all_reduce,
    coalesced_reduce_scatter,
    reduce_scatter,
)
from runtime.comm.device_mesh import current_device, local_rank, start_processes
from runtime.comm.exchange import gather
from runtime.processes.rank import be_a_rank
from runtime.processes.ranks import run_ranks
from runtime.processes.this_machine import device_name, resident_bytes
from runtime.profiling.microbenchmarks import Call, cases, small_model
from runtime.step.narrow_products import narrow_products
from runtime.waiting import Pending

_Made = TypeVar("_Made")

_Start: TypeAlias = Callable[[], Pending]

_SLOWEST = 2.0  # seconds of one call: slower ones are timed once
_SHORT = 1e-3
"""Seconds of a call, including its launch, below which an accelerator might wait for its host."""
_QUEUED = 20
"""Number of calls that are queued together."""
_AHEAD = 4096
"""Rows of the matrices that an accelerator multiplies while calls are queued, and beside collectives."""
_BETWEEN = 512
"""Rows of the matrices that a CPU multiplies between and beside collectives: some milliseconds, as a block of a small
model."""
_LONGER = 2.0
"""Length of the overlapping products, as a multiple of the collective's time."""
_OVERLAPPED = 3
"""Number of message sizes, the largest of an effort, for which overlap is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long a case is timed: windows and the seconds of each; every how many extents one is measured (1: all, 2:
    half of them); exponents of two of the collectives' message sizes."""

    windows: int
    seconds: float
    every: int
    messages: tuple[int, ...]


EFFORTS = {
    "least": Effort(windows=1, seconds=0.002, every=100, messages=(10, 16, 18)),  # only checks that everything runs
    "quick": Effort(windows=5, seconds=0.04, every=2, messages=(10, 14, 16, 18, 20, 22)),
    "usual": Effort(windows=9, seconds=0.08, every=1, messages=(8, 10, 12, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24)),
}


def default_processes() -> int:
    """One process per accelerator, or per core where there is none."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else (os.cpu_count() or 1)


def measure(path: Path, processes: int, *, effort: str, on_line: Callable[[str], None]) -> int:
    """Measure with `processes` processes and one of `EFFORTS`, write the measurements to `path`, and return the exit
    code. `on_line` is called with "NUMBER OF LABEL" before each case. Raises RequestError where there are fewer
    devices."""
    if torch.accelerator.is_available() and torch.accelerator.device_count() < processes:
        raise RequestError(f"--nproc {processes}: this machine has {torch.accelerator.device_count()} devices")
    return run_ranks("runtime.profiling.measuring", [str(path), "--effort", effort], processes, on_line)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m runtime.profiling.measuring FILE`: one of the ranks."""
    parser = argparse.ArgumentParser(prog="python -m runtime.profiling.measuring")
    parser.add_argument("path", type=Path)
    parser.add_argument("--effort", choices=tuple(EFFORTS), default="usual")
    parser.add_argument("--notes")
    given = parser.parse_args(arguments)
    return be_a_rank(lambda at, joined: _measure(given.path, EFFORTS[given.effort]), given.notes)


def _measure(path: Path, effort: Effort) -> int:
    device = current_device(local_rank())
    start_processes(device)
    torch.manual_seed(0)
    machine = _machine(device, effort)
    first = dist.get_rank() == 0
    kernels = list(cases(device, effort.every))
    messages, overlapped = list(_messages(device, effort)), list(_overlapped(device, effort))
    count = len(kernels) + len(messages) + len(overlapped)

    def say(number: int, label: str) -> None:
        if first:
            sys.stdout.write(f"{number} {count} {label}\n")
            sys.stdout.flush()

    rows: list[KernelRow] = []
    for number, case in enumerate(kernels):
        say(number, case.label)
        with narrow_products(case.dtype):
            rows.append(case.row(_seconds(case.prepare(), device, effort, together=False)))
    sent: list[CollectiveRow] = []
    for number, (kind, devices, size, call) in enumerate(messages, start=len(kernels)):
        say(number, f"{kind} of {size} bytes over {devices}")
        seconds = _added(call(), device, effort)
        sent.append(CollectiveRow(kind=kind, devices=devices, message=float(size), seconds=seconds))
    overlaps: list[OverlapRow] = []
    for number, (kind, devices, size, start) in enumerate(overlapped, start=len(kernels) + len(messages)):
        say(number, f"{kind} of {size} bytes over {devices} beside products")
        alone, computed, both = _beside_products(start(), device, effort)
        overlaps.append(
            OverlapRow(kind=kind, devices=devices, message=float(size), alone=alone, computed=computed, together=both)
        )
    if first:
        found = Measurements(
            schema_version=1,
            date=datetime.date.today().isoformat(),
            software=f"PyTorch {torch.__version__}, Python {platform.python_version()}, planner {PLANNER_VERSION}",
            machine=machine,
            kernels=tuple(rows),
            collectives=tuple(sent),
            overlaps=tuple(overlaps),
        )
        write_atomically(path, dump_measurements(found))
        say(count, "written")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _seconds(call: Call, device: torch.device, effort: Effort, *, together: bool) -> float:
    """Seconds of one call: the median window of the median rank. `together`: all ranks make the same number of
    calls."""
    dist.barrier()
    once = min(_window(call, 1, device) for _ in range(2))
    if device.type != "cpu" and not together and once < _SHORT:
        found = [_queued(call, once, device) for _ in range(effort.windows)]
        return statistics.median(_everywhere(statistics.median(found)))
    if together:
        once = max(_everywhere(once))
    windows = 1 if once > _SLOWEST else effort.windows
    calls = max(1, round(effort.seconds / once))
    if together:
        found = [_window(call, calls, device) for _ in range(windows)]
    else:
        found = [_timed_window(call, calls, effort.seconds, device) for _ in range(windows)]
    return statistics.median(_everywhere(statistics.median(found)))


def _added(call: Call, device: torch.device, effort: Effort) -> float:
    """Seconds that a collective adds to a step. On a CPU: the time beyond the products around it, but at least the time
    of back-to-back collectives."""
    least = _seconds(call, device, effort, together=True)
    if device.type != "cpu":
        return least
    product = _product(device)

    def between() -> None:
        product()
        call()

    both, alone = (_seconds(one, device, effort, together=True) for one in (between, product))
    return max(least, both - alone)


def _beside_products(start: _Start, device: torch.device, effort: Effort) -> tuple[float, float, float]:
    """Seconds of a collective, of products that take longer, and of both when the collective is awaited after the
    products."""
    product = _product(device)
    alone = _added(lambda: start().wait(), device, effort)
    each = _seconds(product, device, effort, together=True)
    products = max(1, math.ceil(_LONGER * alone / each))

    def computed() -> None:
        for _ in range(products):
            product()

    def both() -> None:
        work = start()
        computed()
        work.wait()

    return alone, _seconds(computed, device, effort, together=True), _seconds(both, device, effort, together=True)


def _product(device: torch.device) -> Call:
    rows, kind = (_BETWEEN, torch.float32) if device.type == "cpu" else (_AHEAD, torch.bfloat16)
    matrix = torch.ones(rows, rows, device=device, dtype=kind)
    return lambda: torch.mm(matrix, matrix)


def _window(call: Call, calls: int, device: torch.device) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    _finish(device)
    return (time.perf_counter() - start) / calls


def _queued(call: Call, once: float, device: torch.device) -> float:
    """Seconds of a call by the device's clock, without waiting for the host: all calls are queued while the device
    computes long products. `once` is the time of a call including its launch."""
    ahead = _product(device)
    products = math.ceil(2 * _QUEUED * once / _window(ahead, 3, device))
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    for _ in range(products):
        ahead()
    start.record()
    for _ in range(_QUEUED):
        call()
    end.record()
    _finish(device)
    return float(start.elapsed_time(end)) * 1e-3 / _QUEUED


def _host(device: torch.device, effort: Effort) -> float:
    """Seconds of an operator with an almost empty kernel, launched one by one."""
    call, kernels = small_model(device)
    _window(call, 2, device)
    return statistics.median(_window(call, 5, device) for _ in range(effort.windows)) / kernels


def _timed_window(call: Call, calls: int, least: float, device: torch.device) -> float:
    """Time chunks of calls until the window is full, because the first guess of their number may be far off."""
    chunk, done = max(1, calls // 8), 0
    start = time.perf_counter()
    while True:
        for _ in range(chunk):
            call()
        _finish(device)
        done += chunk
        passed = time.perf_counter() - start
        if passed >= least:
            return passed / done


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _everywhere(value: float) -> list[float]:
    return gather(value, float)


def _messages(device: torch.device, effort: Effort) -> Iterator[tuple[str, int, int, Callable[[], Call]]]:
    """Kind, devices, bytes, and a function that makes the call, for groups of neighbours of every size that divides the
    ranks."""
    world = dist.get_world_size()
    for devices in (size for size in range(2, world + 1) if world % size == 0):
        groups = [dist.new_group(list(range(start, start + devices))) for start in range(0, world, devices)]
        group = groups[dist.get_rank() // devices]
        for kind, make in _COLLECTIVES.items():
            for exponent in effort.messages:
                yield kind, devices, 2**exponent, _maker(make, 2**exponent, devices, group, device)


def _overlapped(device: torch.device, effort: Effort) -> Iterator[tuple[str, int, int, Callable[[], _Start]]]:
    """Kind, devices, bytes, and a function that makes the starting call, for collectives of all ranks beside
    products."""
    world, group = dist.get_world_size(), dist.group.WORLD
    if world < 2 or group is None:
        return
    for kind, make in _STARTED.items():
        for exponent in effort.messages[-_OVERLAPPED:]:
            yield kind, world, 2**exponent, _maker(make, 2**exponent, world, group, device)


def _maker(
    make: Callable[[int, dist.ProcessGroup, torch.device], _Made],
    size: int,
    devices: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Callable[[], _Made]:
    elements = max(devices * devices, size // 4)
    return lambda: make(
        elements - elements % (devices * devices) if devices & (devices - 1) else elements, group, device
    )


_Make = Callable[[int, dist.ProcessGroup, torch.device], Call]


def _all_reduce(elements: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    term = torch.ones(elements, device=device)
    return lambda: all_reduce(term, group)


def _all_gather(elements: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    piece = torch.ones(elements // group.size(), device=device)
    return lambda: all_gather(piece, 0, group)


def _reduce_scatter(elements: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    term = torch.ones(elements, device=device)
    return lambda: reduce_scatter(term, 0, group)


def _all_to_all(elements: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    piece = torch.ones(elements // group.size(), group.size(), device=device)
    return lambda: all_to_all(piece, 0, 1, group)


def _broadcast(elements: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    whole = torch.ones(elements, device=device)
    source = dist.get_global_rank(group, 0)
    return lambda: dist.broadcast(whole, source, group)


def _send_recv(elements: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    """Every rank sends to the next of its group, and receives from the one before."""
    here, size = dist.get_rank(group), group.size()
    outgoing, incoming = torch.ones(elements, device=device), torch.empty(elements, device=device)
    after, before = (dist.get_global_rank(group, (here + way) % size) for way in (1, -1))

    def call() -> None:
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, outgoing, after, group), dist.P2POp(dist.irecv, incoming, before, group)]
        )
        for work in works:
            work.wait()

    return call


_COLLECTIVES: dict[str, _Make] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
    "send_recv": _send_recv,
}


_MakeStart = Callable[[int, dist.ProcessGroup, torch.device], _Start]


def _start_all_gather(elements: int, group: dist.ProcessGroup, device: torch.device) -> _Start:
    return _started_by(coalesced_all_gather([torch.ones(elements // group.size(), device=device)], [0], group, [-1]))


def _start_all_reduce(elements: int, group: dist.ProcessGroup, device: torch.device) -> _Start:
    return _started_by(coalesced_all_reduce([torch.ones(elements, device=device)], group))


def _start_reduce_scatter(elements: int, group: dist.ProcessGroup, device: torch.device) -> _Start:
    return _started_by(coalesced_reduce_scatter([torch.ones(elements, device=device)], [0], group))


def _started_by(collective: Collective) -> _Start:
    return partial(collective.call, async_op=True)


_STARTED: dict[str, _MakeStart] = {
    "all_gather": _start_all_gather,
    "all_reduce": _start_all_reduce,
    "reduce_scatter": _start_reduce_scatter,
}


def _machine(device: torch.device, effort: Effort) -> MeasuredMachine:
    """The measured facts of this rank. On a CPU its memory is its share of the machine's."""
    world = dist.get_world_size()
    if device.type == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / world
        reserved = resident_bytes()
        units = int(torch.get_num_threads())
    else:
        module = torch.get_device_module(device)
        torch.zeros(1, device=device)
        free, total = module.mem_get_info(device)
        reserved = float(total - free)
        properties = module.get_device_properties(device)
        units = int(getattr(properties, "multi_processor_count", 0) or getattr(properties, "cube_core_num", 1))
    return MeasuredMachine(
        name=device_name(device),
        device_type=cast(DeviceType, device.type),
        backend=dist.get_backend(),
        processes=world,
        threads=torch.get_num_threads(),
        compute_units=units,
        memory=float(total),
        reserved=reserved,
        slack=_slack(device),
        host=_host(device, effort),
    )


def _slack(device: torch.device) -> float:
    """The share by which tensors of many sizes take more memory than their bytes."""
    sizes = [1_000 * (3 + 7 * (number % 60)) for number in range(200)]
    before = resident_bytes() if device.type == "cpu" else float(torch.accelerator.memory_reserved(device))
    kept = [torch.ones(size, device=device) for size in sizes]
    taken = (resident_bytes() if device.type == "cpu" else float(torch.accelerator.memory_reserved(device))) - before
    return max(0.0, taken / sum(tensor.nbytes for tensor in kept) - 1.0)


if __name__ == "__main__":
    sys.exit(main())
