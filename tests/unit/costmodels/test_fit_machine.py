"""Fitting a whole profile: times made from a known machine give that machine back."""

from dataclasses import replace

import numpy as np
import pytest

from costmodels import (
    AttentionShape,
    CostModelError,
    attention_backward_time,
    attention_time,
    collective_time,
    matmul_time,
    operator_time,
)
from costmodels.fit_machine import fit_machine
from hardware_profiles import (
    AttentionKernel,
    Cluster,
    CollectiveRow,
    Device,
    Efficiency,
    KernelRow,
    Level,
    MatmulKernel,
    MeasuredMachine,
    Measurements,
    OverlapRow,
    Protocol,
    dump_profile,
)
from hardware_profiles.load import parse_profile
from tests.refusals import refused

RATES = {
    "copy": 1.0,
    "cross_entropy": 0.2,
    "elementwise": 0.8,
    "embedding": 0.5,
    "normalisation": 0.15,
    "optimizer": 0.4,
}
KERNEL = MatmulKernel(
    compute=1.0, bandwidth=0.7, launch=5e-6, feed=3e9, fill=60.0, quantisation=0.3, split=2e-6, convert=None, spread=0
)
ATTENTION = AttentionKernel(compute=0.5, softmax=250.0, fill=120.0, tail=0.2, preparation=0, passes=0, spread=0)
SHARES = {name: Efficiency(compute=1.0, bandwidth=rate) for name, rate in RATES.items()}
DEVICE = Device(
    name="made up",
    device_type="cpu",
    memory=4e9,
    reserved=2e8,
    allocator_slack=0.03,
    memory_bandwidth=20e9,
    launch_latency=6e-6,
    peak_flops=(("bf16", 9e10), ("fp32", 4e10)),
    efficiencies=tuple(
        sorted({**SHARES, "attention": SHARES["copy"], "matmul": SHARES["copy"]}.items(), key=lambda pair: pair[0])
    ),
    compute_units=1,
    matmul_kernels=(("bf16", None), ("fp32", KERNEL)),
    attention_kernels=(("bf16", None), ("fp32", ATTENTION)),
)
PROTOCOLS = (
    Protocol(name="rings", setup=150e-6, latency=80e-6, efficiency=1.0, serves="rings"),
    Protocol(name="peers", setup=60e-6, latency=40e-6, efficiency=0.6, serves="peers"),
)
CLUSTER = Cluster(
    name="made-up-x4",
    device=DEVICE,
    levels=(Level(name="host", fan_out=None, network="switch", bandwidth=1.5e9, protocols=PROTOCOLS),),
    devices=4,
)
PRODUCTS = (
    (16, 128, 128), (64, 256, 256), (128, 512, 512), (256, 256, 1024), (256, 1024, 256), (512, 128, 512),
    (512, 1408, 512), (512, 512, 1408), (1024, 1024, 1024), (32, 2048, 512), (2048, 64, 512), (300, 700, 200),
)  # fmt: skip
CALLS = ((1, 2, 2, 64, 32), (2, 4, 2, 128, 32), (2, 8, 4, 128, 64), (4, 4, 4, 256, 64), (2, 4, 4, 512, 128))


def _kernels(noise: float) -> tuple[KernelRow, ...]:
    random = np.random.default_rng(0)
    rows = []

    def add(op_class: str, direction: str, dtype: str, seconds: float, **counted: float | tuple[int, ...]) -> None:
        values = {"flops": 0.0, "bytes_moved": 0.0, "kernels": 1, **counted}
        scattered = float(seconds * np.exp(noise * random.standard_normal()))
        rows.append(
            KernelRow(op_class=op_class, call="made up", direction=direction, dtype=dtype, seconds=scattered, **values)  # type: ignore[arg-type]
        )

    for dtype in ("fp32", "bf16"):
        for m, n, k in PRODUCTS:
            time = matmul_time(m, n, k, 1.0, dtype, DEVICE)
            add("matmul", "forward", dtype, float(time), flops=2.0 * m * n * k, extents=(m, n, k))
    for batch, heads, key_heads, length, width in CALLS:
        shape = AttentionShape(
            batch=batch, heads=heads, key_heads=key_heads, queries=length, keys=length, head_dim=width,
            value_dim=width, causal=True,
        )  # fmt: skip
        extents = (batch, heads, key_heads, length, length, width)
        for direction, function in (("forward", attention_time), ("backward", attention_backward_time)):
            seconds = float(function(shape, "fp32", DEVICE))
            add("attention", direction, "fp32", seconds, flops=float(shape.flops), extents=extents)
    for op_class in RATES:
        for moved in (2e3, 2e5, 2e6, 2e7):
            for kernels in (1, 2):
                seconds = operator_time(
                    op_class=op_class, flops=0.0, bytes_moved=moved, dtype="fp32", device=DEVICE, kernels=kernels
                )
                add(op_class, "forward", "fp32", seconds, bytes_moved=moved, kernels=kernels)
    return tuple(rows)


def made_up_measurements(noise: float = 0.0) -> Measurements:
    random = np.random.default_rng(1)
    collectives = tuple(
        CollectiveRow(
            kind=kind, devices=devices, message=message,
            seconds=collective_time(kind, message, CLUSTER.group(devices, 1))
            * float(np.exp(noise * random.standard_normal())),
        )
        for kind in ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter", "send_recv")
        for devices in (2, 4)
        for message in (1e3, 3e4, 3e5, 3e6, 3e7)
    )  # fmt: skip
    machine = MeasuredMachine(
        name="Made Up, 4 cores", device_type="cpu", backend="gloo", processes=4, threads=1, compute_units=1,
        memory=4e9, reserved=2e8, slack=0.03,
    )  # fmt: skip
    return Measurements(
        schema_version=1, date="2026-11-20", software="PyTorch", machine=machine, kernels=_kernels(noise),
        collectives=collectives,
    )  # fmt: skip


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.02), (0.02, 0.05)])
def test_a_known_machine_is_found_again(noise: float, tolerance: float) -> None:
    found = fit_machine(made_up_measurements(noise)).cluster
    device, level = found.device, found.levels[0]
    assert device.memory_bandwidth == pytest.approx(DEVICE.memory_bandwidth, rel=tolerance)
    assert device.launch_latency == pytest.approx(DEVICE.launch_latency, rel=tolerance)
    for name, share in RATES.items():
        assert device.efficiency(name).bandwidth == pytest.approx(share, rel=tolerance), name
    for one, other in zip(level.protocols, PROTOCOLS, strict=True):
        rate = one.efficiency * level.bandwidth
        assert rate == pytest.approx(other.efficiency * 1.5e9, rel=tolerance), other.name
    small = {name: found.with_devices(4).group(devices, 1) for name, devices in (("two", 2), ("four", 4))}
    for kind in ("all_reduce", "all_gather", "all_to_all", "send_recv"):
        for group in small.values():
            known = collective_time(kind, 1e3, CLUSTER.group(group.size, 1))
            assert collective_time(kind, 1e3, group) == pytest.approx(known, rel=2 * tolerance), kind


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_products_of_other_shapes_are_predicted(dtype: str) -> None:
    device = fit_machine(made_up_measurements()).cluster.device
    for m, n, k in ((200, 600, 400), (768, 768, 768), (2048, 512, 512)):
        known = matmul_time(m, n, k, 1.0, dtype, DEVICE)
        assert matmul_time(m, n, k, 1.0, dtype, device) == pytest.approx(known, rel=0.05)


def test_residuals_are_small_where_the_model_holds() -> None:
    residuals = fit_machine(made_up_measurements()).residuals
    assert {one.what: one.error for one in residuals if one.error > 0.02} == {}
    assert {"matmul fp32", "attention fp32", "copy", "all_reduce"} <= {one.what for one in residuals}


def test_one_process_has_no_network_to_fit() -> None:
    alone = replace(made_up_measurements(), collectives=())
    fitted = fit_machine(replace(alone, machine=replace(alone.machine, processes=1)))
    assert fitted.cluster.devices == 1
    assert "for 1 device only" in fitted.origins["level"].source


def test_a_class_that_is_missing_is_named() -> None:
    measurements = made_up_measurements()
    kept = tuple(row for row in measurements.kernels if row.op_class != "embedding")
    with refused(CostModelError, "embedding"):
        fit_machine(replace(measurements, kernels=kept))


def test_launches_of_the_host_come_into_the_profile() -> None:
    measured = made_up_measurements()
    fitted = fit_machine(replace(measured, machine=replace(measured.machine, host=1.2e-5)))
    text = dump_profile(fitted.cluster, fitted.origins, "made up")
    launch = fitted.cluster.device.launch_latency  # of the kernel, which the same core computes
    found = parse_profile(text.encode(), fitted.cluster.name).device
    assert found.host_latency == pytest.approx(1.2e-5 - launch)
    assert "host_latency" not in dump_profile(fit_machine(measured).cluster, fitted.origins, "made up")


def test_what_products_leave_exposed_of_collectives_is_of_the_device() -> None:
    def row(together: float) -> OverlapRow:
        return OverlapRow(kind="all_reduce", devices=2, message=1e6, alone=0.01, computed=0.03, together=together)

    def units(*together: float) -> float:
        measured = replace(made_up_measurements(), overlaps=tuple(map(row, together)))
        fitted = fit_machine(measured)
        text = dump_profile(fitted.cluster, fitted.origins, "made up")
        return parse_profile(text.encode(), fitted.cluster.name).device.communication_units

    assert units() == 0.0
    assert units(0.031, 0.036, 0.05) == pytest.approx(0.6)
    assert units(0.029) == 0.0  # faster than without, by noise
    assert 0.9 < units(0.06) < 1  # of its one unit
