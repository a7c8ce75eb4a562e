import numpy as np
import pytest

from costmodels import CostModelError, operator_time, optimizer_time
from hardware_profiles import Device, Efficiency, UnknownKeyError
from tests.refusals import refused

DEVICE = Device(
    name="round numbers",
    device_type="cuda",
    memory=100.0,
    reserved=10.0,
    allocator_slack=0.5,
    memory_bandwidth=1e12,
    launch_latency=1e-6,
    peak_flops=(("bf16", 1e14), ("fp32", 1e13)),
    efficiencies=(
        ("matmul", Efficiency(compute=0.5, bandwidth=0.8)),
        ("optimizer", Efficiency(compute=0.5, bandwidth=0.5)),
    ),
    compute_units=4,
    matmul_kernels=(("bf16", None), ("fp32", None)),
    attention_kernels=(("bf16", None), ("fp32", None)),
)


def test_roofline_takes_the_slower_side() -> None:
    compute_bound = operator_time(op_class="matmul", flops=1e12, bytes_moved=8e6, dtype="bf16", device=DEVICE)
    assert compute_bound == pytest.approx(1e-6 + 0.02)
    memory_bound = operator_time(op_class="matmul", flops=1e6, bytes_moved=8e9, dtype="bf16", device=DEVICE, kernels=3)
    assert memory_bound == pytest.approx(3e-6 + 0.01)


def test_arrays_are_priced_element_by_element() -> None:
    flops, bytes_moved = np.array([1e12, 1e6, 0.0]), np.array([8e6, 8e9, 0.0])
    times = operator_time(op_class="matmul", flops=flops, bytes_moved=bytes_moved, dtype="bf16", device=DEVICE)
    single = [
        operator_time(op_class="matmul", flops=float(f), bytes_moved=float(b), dtype="bf16", device=DEVICE)
        for f, b in zip(flops, bytes_moved, strict=True)
    ]
    assert times == pytest.approx(single)


def test_no_work_still_launches_and_only_views_are_free() -> None:
    assert operator_time(op_class="matmul", flops=0, bytes_moved=0, dtype="bf16", device=DEVICE) == 1e-6
    assert operator_time(op_class="view", flops=0, bytes_moved=1e9, dtype="bf16", device=DEVICE) == 0
    free = operator_time(op_class="view", flops=0, bytes_moved=np.ones(3), dtype="bf16", device=DEVICE)
    assert np.array_equal(free, np.zeros(3))


def test_unknown_words_raise() -> None:
    with refused(UnknownKeyError, "softmax", "matmul"):
        operator_time(op_class="softmax", flops=1, bytes_moved=1, dtype="bf16", device=DEVICE)
    with refused(UnknownKeyError, "fp8", "bf16"):
        operator_time(op_class="matmul", flops=1, bytes_moved=1, dtype="fp8", device=DEVICE)


def test_negative_work_raises() -> None:
    with refused(CostModelError, "matmul", -1, 2):
        operator_time(op_class="matmul", flops=-1, bytes_moved=2, dtype="bf16", device=DEVICE)
    with refused(CostModelError, "matmul", 1):
        operator_time(op_class="matmul", flops=np.array([1.0, -1.0]), bytes_moved=1, dtype="bf16", device=DEVICE)


def test_optimizer_moves_its_bytes_once() -> None:
    assert optimizer_time(1e9, "bf16", "adamw", DEVICE) == pytest.approx(1e-6 + 30e9 / 0.5e12)
    assert optimizer_time(0.0, "bf16", "adamw", DEVICE) == 0
    assert optimizer_time(np.array([0.0, 1e9]), "fp32", "sgd", DEVICE) == pytest.approx([0, 1e-6 + 20e9 / 0.5e12])
