"""Matrix products and attention on a device of round numbers, worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from costmodels import (
    AttentionShape,
    CostModelError,
    attention_backward_time,
    attention_preparation,
    attention_time,
    best_rate,
    matmul_time,
    operator_time,
)
from hardware_profiles import AttentionKernel, Device, Efficiency, MatmulKernel, UnknownKeyError
from tests.refusals import refused

US = 1e-6
KERNEL = MatmulKernel(
    compute=0.5, bandwidth=0.5, launch=US, feed=1e30, fill=0, quantisation=1, split=1.0, convert=None, spread=0.1
)
ATTENTION = AttentionKernel(compute=0.5, softmax=0, fill=0, tail=0, preparation=3 * US, passes=1, spread=0.1)
DEVICE = Device(
    name="round numbers",
    device_type="cuda",
    memory=100.0,
    reserved=10.0,
    allocator_slack=0.5,
    memory_bandwidth=2e12,
    launch_latency=US,
    peak_flops=(("bf16", 2e12), ("fp32", 1e12), ("fp8", 4e12)),
    efficiencies=(
        ("attention", Efficiency(compute=0.5, bandwidth=0.5)),
        ("matmul", Efficiency(compute=0.25, bandwidth=0.5)),
    ),
    compute_units=4,
    matmul_kernels=(("bf16", KERNEL), ("fp32", None), ("fp8", replace(KERNEL, convert=3e9))),
    attention_kernels=(("bf16", ATTENTION), ("fp32", None)),
)


def test_waves_of_tiles_by_hand() -> None:
    """Four units of 0.25 TFLOP/s. Four tiles of 128 x 128 are one wave. With a row more the best are twenty tiles of
    64 x 64, five waves of a quarter. Five of them are two waves, unless the work of the second is shared out."""
    wave = 2 * 128 * 128 * 1024 / 0.25e12
    assert matmul_time(256, 256, 1024, 1, "bf16", DEVICE) == pytest.approx(US + wave, rel=1e-3)
    assert matmul_time(257, 256, 1024, 1, "bf16", DEVICE) == pytest.approx(US + 5 / 4 * wave, rel=1e-3)
    shared = replace(DEVICE, matmul_kernels=(("bf16", replace(KERNEL, quantisation=0)),))
    assert matmul_time(64, 320, 1024, 1, "bf16", DEVICE) == pytest.approx(US + 2 / 4 * wave, rel=1e-2)
    assert matmul_time(64, 320, 1024, 1, "bf16", shared) == pytest.approx(US + 5 / 16 * wave, rel=1e-2)


def test_a_batch_is_more_tiles() -> None:
    one = matmul_time(256, 256, 1024, 1, "bf16", DEVICE) - US
    assert matmul_time(256, 256, 1024, 8, "bf16", DEVICE) - US == pytest.approx(8 * one)


def test_long_and_thin_is_cut_along_k_where_that_pays() -> None:
    cheap = replace(DEVICE, matmul_kernels=(("bf16", replace(KERNEL, split=US)),))
    assert matmul_time(64, 64, 1e6, 1, "bf16", cheap) < 0.3 * matmul_time(64, 64, 1e6, 1, "bf16", DEVICE)


def test_memory_bounds_what_computes_little() -> None:
    """One column of results: m k numbers of two bytes are read at half of 2 TB/s."""
    time = matmul_time(1e6, 64, 32, 1, "bf16", replace(DEVICE, peak_flops=(("bf16", 1e18),)))
    assert time == pytest.approx(US + 2 * (1e6 * 32 + 64 * 32 + 1e6 * 64) / 1e12, rel=1e-3)


def test_fp8_operands_are_converted_first() -> None:
    plain = replace(DEVICE, matmul_kernels=(("fp8", KERNEL),))
    extra = matmul_time(256, 256, 1024, 1, "fp8", DEVICE) - matmul_time(256, 256, 1024, 1, "fp8", plain)
    assert extra == pytest.approx(3 * 256 * 1024 / 3e9)


def test_without_figures_it_is_the_roofline_of_the_class() -> None:
    m, n, k = np.array([64.0, 1000.0]), 128.0, 256.0
    times = matmul_time(m, n, k, 3.0, "fp32", DEVICE)
    moved = 3 * 4 * (m * k + k * n + m * n)
    expected = operator_time(op_class="matmul", flops=6 * m * n * k, bytes_moved=moved, dtype="fp32", device=DEVICE)
    assert np.asarray(times) == pytest.approx(expected)
    shape = attention_shape(causal=False)
    assert attention_time(shape, "fp32", DEVICE) == pytest.approx(US + 4 * 8 * 512 * 512 * 128 / 0.5e12)
    assert attention_preparation(shape, "fp32", DEVICE) == 0


def attention_shape(*, causal: bool, queries: float = 512.0) -> AttentionShape:
    return AttentionShape(
        batch=2.0, heads=4.0, key_heads=1.0, queries=queries, keys=512.0, head_dim=128.0, value_dim=128.0, causal=causal
    )


def test_attention_by_hand() -> None:
    """Eight heads of 512 x 512 scores, 512 FLOP each, at 1 TFLOP/s; causal: ten of sixteen tiles."""
    full = 8 * 512 * 512 * 512 / 1e12
    assert attention_time(attention_shape(causal=False), "bf16", DEVICE) == pytest.approx(US + full, rel=1e-3)
    assert attention_time(attention_shape(causal=True), "bf16", DEVICE) == pytest.approx(US + 0.625 * full, rel=1e-3)
    backward = attention_backward_time(attention_shape(causal=False), "bf16", DEVICE)
    assert backward == pytest.approx(3 * US + full * 2.5 * 73 / 63, rel=1e-3)
    prepared = attention_preparation(attention_shape(causal=True), "bf16", DEVICE)
    assert prepared == pytest.approx(3 * US + 2 * 2 * 2 * (4 + 2) * 512 * 128 / 2e12)


def test_few_long_tiles_leave_units_idle() -> None:
    one = replace(attention_shape(causal=False, queries=128.0), batch=1.0, heads=1.0)
    assert attention_time(one, "bf16", DEVICE) == pytest.approx(US + 128 * 512 * 512 / 0.25e12, rel=1e-3)


def test_the_rate_of_bounds() -> None:
    assert best_rate("matmul", "bf16", DEVICE) == 1e12
    assert best_rate("matmul", "fp32", DEVICE) == 0.25e12
    slow = replace(DEVICE, attention_kernels=(("bf16", replace(ATTENTION, softmax=512.0)),))
    assert best_rate("attention", "bf16", slow) == pytest.approx(1e12 * math.sqrt(2))


def test_what_is_refused() -> None:
    with refused(CostModelError, 0, 1):
        matmul_time(np.array([4.0, 0.0]), 1.0, 1.0, 1.0, "bf16", DEVICE)
    with refused(CostModelError, "attention", 0, 1):
        attention_time(attention_shape(causal=True, queries=0.0), "bf16", DEVICE)
    with refused(CostModelError, "int4", "bf16"):
        matmul_time(1, 1, 1, 1, "int4", DEVICE)
    with refused(UnknownKeyError, "fp16", "bf16, fp32, fp8"):
        matmul_time(1, 1, 1, 1, "fp16", DEVICE)
    with refused(UnknownKeyError, "attention", "fp16", "bf16, fp32"):
        attention_time(attention_shape(causal=True), "fp16", DEVICE)
