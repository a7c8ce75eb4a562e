"""A whole profile from the measured times of one machine.

    products of a dtype ──────────── fit_matmul ─────────┐      peak: the rate that large products approach
    attention, both passes ───────── fit_parameters ─────┤
    all other classes together ───── k L + B / w_class ──┼── Cluster, the source of every number, residuals
    collectives ──────────────────── fit_levels ─────────┤
    collectives beside products ──── median exposed ─────┘      share of the device that they occupy

Some numbers count only as a product. A convention separates them: the best kernel has share 1 of the peak, the class
with the highest rate share 1 of the memory bandwidth, the best protocol share 1 of the network's. If a plain rate
follows the times of a dtype as well as a tiled kernel does, the rate alone describes the dtype.

On a CPU every number is that of one process among as many as were measured, with its share of cores, caches and memory.
Not good for: another number of processes where cores are shared; kernels that read what the last one left in the cache
(they are faster than the class).

Residuals are the mean of |predicted / measured - 1| over the rows of a class, predicted by the functions that price
plans. Takes a few seconds.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodels.collectives import PEER_KINDS, collective_time
from costmodels.errors import CostModelError
from costmodels.fit import SOFTMAX, SOFTMAX_START, fit_matmul, fit_parameters, percentage_error
from costmodels.fit_collectives import Measured, fit_levels, relative_errors
from costmodels.kernels.attention import AttentionShape, attention_backward_time, attention_time
from costmodels.kernels.compute import operator_time
from costmodels.kernels.matmul import matmul_time
from costmodels.units import Array, BytesPerSecond, FlopsPerSecond, Seconds
from hardware_profiles import (
    OP_CLASSES,
    AttentionKernel,
    Cluster,
    Device,
    Efficiency,
    KernelRow,
    Level,
    MatmulKernel,
    Measurements,
    Origin,
    Protocol,
)

_BY_SHAPE = ("attention", "matmul")
_HEADROOM = 1.5  # the fit starts from a peak of this times the best measured rate
_FEWEST = 6  # products or attention calls that a kernel needs for a fit
_MOST_OCCUPIED = 0.95  # of a device, so that overlapping always gains something: an assumption
_STARTS = (0.3, 1.0, 3.0)  # of latencies, times the guess


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """How far predictions are from the measured times of some rows: mean |predicted / measured - 1|."""

    what: str
    rows: int
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedMachine:
    """A machine as a profile describes it, the source of each number (see `dump_profile`), and the residuals."""

    cluster: Cluster
    origins: Mapping[str, Origin]
    residuals: tuple[Residual, ...]


def fit_machine(measurements: Measurements) -> FittedMachine:
    """Fit a profile to measured times.

    Raises:
        CostModelError: a class of kernels was not measured, or rows that `fit_parameters` or `fit_levels` refuse.
    """
    missing = sorted(set(OP_CLASSES) - {row.op_class for row in measurements.kernels})
    if missing:
        raise CostModelError(f"no measured times of {', '.join(missing)}: a profile needs every class of kernels")
    device = _with_shapes(_device(measurements), measurements.kernels)
    levels, devices = (_level(measurements, device),), measurements.machine.processes
    cluster = Cluster(name=_identity(measurements), device=device, levels=levels, devices=devices)
    return FittedMachine(cluster=cluster, origins=_origins(measurements), residuals=_residuals(cluster, measurements))


def _identity(measurements: Measurements) -> str:
    words = re.findall(r"[a-z0-9]+", measurements.machine.name.lower())
    return f"{'-'.join(words)}-x{measurements.machine.processes}"


def _device(measurements: Measurements) -> Device:
    """The device without kernels by shape: launch latency, rates of the other classes, and peaks."""
    machine, kernels = measurements.machine, measurements.kernels
    launch, rates = _memory_bound([row for row in kernels if row.op_class not in _BY_SHAPE])
    bandwidth = max(rates.values())
    shares = {name: Efficiency(compute=1.0, bandwidth=rate / bandwidth) for name, rate in rates.items()}
    products: dict[str, FlopsPerSecond] = {}
    for row in kernels:
        if row.op_class == "matmul":
            products[row.dtype] = max(products.get(row.dtype, 0.0), row.flops / row.seconds)
    attention = [row for row in kernels if row.op_class == "attention" and row.dtype in products]
    share = float(np.median([row.flops / row.seconds / products[row.dtype] for row in attention])) if attention else 1.0
    shares["matmul"] = Efficiency(compute=1.0, bandwidth=shares["copy"].bandwidth)
    shares["attention"] = Efficiency(compute=min(1.0, share), bandwidth=shares["copy"].bandwidth)
    return Device(
        name=f"{machine.name}, one of {machine.processes} processes",
        device_type=machine.device_type,
        memory=machine.memory,
        reserved=machine.reserved,
        allocator_slack=machine.slack,
        memory_bandwidth=bandwidth,
        launch_latency=launch,
        peak_flops=tuple(sorted(products.items())),
        efficiencies=tuple(sorted(shares.items())),
        compute_units=machine.compute_units,
        host_latency=max(0.0, machine.host - launch) if machine.device_type == "cpu" else machine.host,
        communication_units=machine.compute_units * _occupied(measurements),
        matmul_kernels=tuple((dtype, None) for dtype in sorted(products)),
        attention_kernels=tuple((dtype, None) for dtype in sorted(products)),
    )


def _occupied(measurements: Measurements) -> float:
    """Share of the device that a collective occupies (see `Device.overlapped`): the median over the overlap
    measurements.

    It is the share of a collective's time that simultaneous products leave exposed; 0 if none was measured. Part of the
    device is always left for computation.
    """
    shares = [(row.together - row.computed) / row.alone for row in measurements.overlaps]
    return min(_MOST_OCCUPIED, max(0.0, float(np.median(shares)))) if shares else 0.0


def _memory_bound(rows: Sequence[KernelRow]) -> tuple[Seconds, dict[str, BytesPerSecond]]:
    """Launch latency, and the rate of each class, from t = k L + B / w."""
    classes = sorted({row.op_class for row in rows})
    kernels, moved, seconds = _columns(rows)
    place = np.array([classes.index(row.op_class) for row in rows])

    def predict(values: Mapping[str, float]) -> Array:
        rates = np.array([values[name] for name in classes])
        return np.asarray(kernels * values["launch"] + moved / rates[place])

    largest = {
        name: float(np.median([row.bytes_moved / row.seconds for row in rows if row.op_class == name]))
        for name in classes
    }
    start = {"launch": float((seconds / kernels).min()), **largest}
    found = fit_parameters(predict, seconds, start, logarithmic=True)
    return found.values["launch"], {name: found.values[name] for name in classes}


def _columns(rows: Sequence[KernelRow]) -> tuple[Array, Array, Array]:
    kernels = np.array([row.kernels for row in rows], dtype=float)
    return kernels, np.array([row.bytes_moved for row in rows]), np.array([row.seconds for row in rows])


def _with_shapes(device: Device, rows: Sequence[KernelRow]) -> Device:
    """The device with its matmul and attention kernels, and with the peaks that their shares refer to."""
    matmuls: dict[str, MatmulKernel | None] = {}
    peaks = dict(device.peak_flops)
    for dtype in peaks:
        of_dtype = [row for row in rows if row.op_class == "matmul" and row.dtype == dtype]
        peaks[dtype], matmuls[dtype] = _product(of_dtype, dtype, device)
    device = replace(device, peak_flops=tuple(sorted(peaks.items())), matmul_kernels=tuple(sorted(matmuls.items())))
    attentions = {}
    for dtype in peaks:
        of_dtype = [row for row in rows if row.op_class == "attention" and row.dtype == dtype]
        attentions[dtype] = _attention(of_dtype, dtype, device)
    return replace(device, attention_kernels=tuple(sorted(attentions.items())))


def _product(rows: Sequence[KernelRow], dtype: str, device: Device) -> tuple[FlopsPerSecond, MatmulKernel | None]:
    """Peak and kernel of a dtype; None for the kernel if a plain rate fits as well."""
    m, n, k, seconds = _shapes(rows)
    best = device.peak(dtype)

    def plain(values: Mapping[str, float]) -> Array:
        tried = replace(device, peak_flops=((dtype, values["peak"]),), matmul_kernels=((dtype, None),))
        return np.asarray(matmul_time(m, n, k, 1.0, dtype, tried))

    rate = fit_parameters(plain, seconds, {"peak": best}, logarithmic=True)
    if len(rows) < _FEWEST + 1:
        return rate.values["peak"], None
    roomy = replace(device, peak_flops=((dtype, best * _HEADROOM),))
    kernel = fit_matmul(m, n, k, seconds, dtype, roomy)
    peak, kernel = best * _HEADROOM * kernel.compute, replace(kernel, compute=1.0)
    fitted = replace(device, peak_flops=((dtype, peak),), matmul_kernels=((dtype, kernel),))
    error = percentage_error(np.asarray(matmul_time(m, n, k, 1.0, dtype, fitted)), seconds)
    if error < percentage_error(plain(rate.values), seconds):
        return peak, kernel
    return rate.values["peak"], None


def _shapes(rows: Sequence[KernelRow]) -> tuple[Array, Array, Array, Array]:
    m, n, k = (np.array([row.extents[place] for row in rows], dtype=float) for place in range(3))
    return m, n, k, np.array([row.seconds for row in rows])


def _attention(rows: Sequence[KernelRow], dtype: str, device: Device) -> AttentionKernel | None:
    """The attention kernel closest to the measured times of both passes; None for fewer than `_FEWEST` rows."""
    if len(rows) < _FEWEST:
        return None
    seconds = np.array([row.seconds for row in rows])
    fixed = AttentionKernel(compute=1, softmax=SOFTMAX, fill=0, tail=0, preparation=0, passes=0, spread=0)

    def predict(values: Mapping[str, float]) -> Array:
        return _attention_seconds(rows, dtype, replace(device, attention_kernels=((dtype, replace(fixed, **values)),)))

    start = {"compute": 0.4, "fill": 100.0, "tail": 0.1}
    if len({row.extents[5] for row in rows}) > 1:
        start["softmax"] = SOFTMAX_START
    found = fit_parameters(predict, seconds, start, {"compute": 1.0}, logarithmic=True)
    return replace(fixed, **found.values, spread=found.spread)


def _attention_seconds(rows: Sequence[KernelRow], dtype: str, device: Device) -> Array:
    columns = np.array([row.extents for row in rows], dtype=float).T
    batch, heads, key_heads, queries, keys, width = columns
    shape = AttentionShape(
        batch=batch, heads=heads, key_heads=key_heads, queries=queries, keys=keys, head_dim=width, value_dim=width,
        causal=True,
    )  # fmt: skip
    forward = np.array([row.direction == "forward" for row in rows])
    return np.where(forward, attention_time(shape, dtype, device), attention_backward_time(shape, dtype, device))


def _level(measurements: Measurements, device: Device) -> Level:
    """The network between the processes: one protocol for rings and trees, one for peer-to-peer."""
    rows = _measured(measurements)
    machine = measurements.machine
    name = "host" if machine.device_type == "cpu" else "node"
    fan_out = None if machine.device_type == "cpu" or machine.processes < 2 else machine.processes
    if not rows:
        alone = Protocol(name=machine.backend, setup=0.0, latency=device.launch_latency, efficiency=1.0)
        return Level(
            name=name, fan_out=fan_out, network="switch", bandwidth=device.memory_bandwidth, protocols=(alone,)
        )
    bandwidth = 4 * max(row.message / row.seconds for row in rows)
    several = len({row.devices for row in rows}) > 1
    tried = []
    for factor in _STARTS:
        protocols = tuple(
            _first_guess(
                serves, [row for row in rows if (row.kind in PEER_KINDS) == (serves == "peers")], factor, several
            )
            for serves in ("rings", "peers")
        )
        level = Level(name=name, fan_out=fan_out, network="switch", bandwidth=bandwidth, protocols=protocols)
        start = Cluster(name="start", device=device, levels=(level,), devices=machine.processes)
        fitted = fit_levels(start, rows, errors="logarithmic")
        error = np.abs(np.log1p(relative_errors(fitted, rows))).mean()
        tried.append((float(error), fitted.levels[0]))
    _, best = min(tried, key=lambda pair: pair[0])
    highest = best.efficiency
    protocols = tuple(replace(one, efficiency=one.efficiency / highest) for one in best.protocols)
    return replace(best, bandwidth=best.bandwidth * highest, protocols=protocols)


def _first_guess(serves: str, rows: Sequence[Measured], factor: float, several: bool) -> Protocol:
    small = min((row.seconds for row in rows), default=1e-4)
    return Protocol(
        name=serves,
        setup=factor * small if several else 0.0,  # with groups of one size it cannot be told from the latency
        latency=factor * small,
        efficiency=0.25,
        serves="rings" if serves == "rings" else "peers",
    )


def _measured(measurements: Measurements) -> list[Measured]:
    return [
        Measured(kind=row.kind, devices=row.devices, message=row.message, seconds=row.seconds)
        for row in measurements.collectives
    ]


def _residuals(cluster: Cluster, measurements: Measurements) -> tuple[Residual, ...]:
    groups: dict[str, list[KernelRow]] = {}
    for row in measurements.kernels:
        what = f"{row.op_class} {row.dtype}" if row.op_class in _BY_SHAPE else row.op_class
        groups.setdefault(what, []).append(row)
    found = []
    for what, rows in sorted(groups.items()):
        seconds = np.array([row.seconds for row in rows])
        error = percentage_error(_kernel_seconds(rows, cluster.device), seconds)
        found.append(Residual(what=what, rows=len(rows), error=error))
    for kind in sorted({row.kind for row in measurements.collectives}):
        sent = [row for row in measurements.collectives if row.kind == kind]
        predicted = [collective_time(kind, row.message, cluster.group(row.devices, 1)) for row in sent]
        error = percentage_error(np.array(predicted), np.array([row.seconds for row in sent]))
        found.append(Residual(what=kind, rows=len(sent), error=error))
    return tuple(found)


def _kernel_seconds(rows: Sequence[KernelRow], device: Device) -> Array:
    """Seconds by the functions that price plans. Rows share one op class and, for matmul and attention, one dtype."""
    op_class, dtype = rows[0].op_class, rows[0].dtype
    if op_class == "matmul":
        m, n, k, _ = _shapes(rows)
        return np.asarray(matmul_time(m, n, k, 1.0, dtype, device))
    if op_class == "attention":
        return _attention_seconds(rows, dtype, device)
    kernels, moved, _ = _columns(rows)
    flops = np.array([row.flops for row in rows])
    time = operator_time(op_class=op_class, flops=flops, bytes_moved=moved, dtype=dtype, device=device, kernels=kernels)
    return np.asarray(time)


def _origins(measurements: Measurements) -> dict[str, Origin]:
    source = measurements.source
    network = f"{source}: collectives of groups of neighbours, all groups at once"
    if not measurements.collectives:
        network = f"{source}: one process, so no collective was measured; for 1 device only"

    def fitted(what: str) -> Origin:
        return Origin(source=f"{source}: {what}", kind="fitted")

    return {
        "device": Origin(source=f"{source}: what the system says", kind="measured"),
        "device.reserved_gib": Origin(source=f"{source}: taken before the first tensor", kind="measured"),
        "device.allocator_slack": Origin(source=f"{source}: 200 tensors of 12 KB to 1.7 MB", kind="measured"),
        "device.memory_bandwidth_gb_per_s": fitted("the class of kernels with the highest rate"),
        "device.launch_latency_us": fitted("what all classes that are priced by bytes have in common"),
        "device.host_latency_us": fitted("kernels of blocks on small tensors; on a CPU less launch_latency_us"),
        "device.communication_units": fitted("what products that take longer leave exposed of collectives"),
        "device.peak_tflops": fitted("the rate that large products approach"),
        "device.efficiency": fitted("rate of bytes; no FLOP was found to bind"),
        "device.efficiency.matmul": fitted("the peak is what products reach; bandwidth as of copies"),
        "device.efficiency.attention": fitted("median rate of attention; bandwidth as of copies"),
        "device.matmul": fitted("linear layers, forward and backward"),
        "device.attention": fitted("causal attention, forward and backward"),
        "level": Origin(source=network, kind="fitted"),
        "level.0.fan_out": Origin(source=f"{source}: devices that were there", kind="measured"),
    }
