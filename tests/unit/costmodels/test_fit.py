"""A fit finds the kernel that made the times, whatever a few rows say, and says what it cannot do."""

from dataclasses import replace

import numpy as np
import pytest

from costmodels import (
    AttentionShape,
    CostModelError,
    attention_preparation,
    attention_time,
    fit_attention,
    fit_matmul,
    matmul_time,
    percentage_error,
)
from costmodels.fit import fit_parameters
from hardware_profiles import load_profile
from tests.refusals import refused

DEVICE = load_profile("h100-80gb").device
RANDOM = np.random.default_rng(7)


def extents(low: int, high: int, count: int) -> np.ndarray:
    return np.round(2.0 ** RANDOM.uniform(low, high, count))


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_products_of_a_known_kernel(dtype: str) -> None:
    kernel = DEVICE.matmul_kernel(dtype)
    assert kernel is not None
    true = replace(kernel, clock=1.0, compute=0.6, bandwidth=0.7, quantisation=0.5, fill=300.0)
    m, n, k = (extents(5, 14, 200) for _ in range(3))
    times = np.asarray(matmul_time(m, n, k, 1.0, dtype, replace(DEVICE, matmul_kernels=((dtype, true),))))
    wild = times.copy()
    wild[::20] *= 4  # rows for which a library chose badly
    found = fit_matmul(m, n, k, wild, dtype, DEVICE)
    for name in ("compute", "bandwidth", "launch", "fill"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.05), name
    assert found.spread < 0.02
    again = np.asarray(matmul_time(m, n, k, 1.0, dtype, replace(DEVICE, matmul_kernels=((dtype, found),))))
    assert percentage_error(again, times) < 0.01


def test_attention_of_a_known_kernel() -> None:
    kernel = DEVICE.attention_kernel("bf16")
    assert kernel is not None
    true = replace(kernel, compute=0.55, softmax=250.0, fill=300.0)
    count = 150
    groups, queries = RANDOM.integers(1, 9, count).astype(float), extents(8, 14, count)
    shape = AttentionShape(
        batch=extents(0, 6, count),
        heads=groups * 4,
        key_heads=groups,
        queries=queries,
        keys=queries,
        head_dim=RANDOM.choice([64.0, 128.0, 256.0], count),
        value_dim=np.full(count, 128.0),
        causal=True,
    )
    device = replace(DEVICE, attention_kernels=(("bf16", true),))
    times = np.asarray(attention_time(shape, "bf16", device) + attention_preparation(shape, "bf16", device))
    found = fit_attention(shape, times, "bf16", DEVICE)
    assert (found.compute, found.softmax, found.fill) == pytest.approx((0.55, 250.0, 300.0), rel=0.05)


def test_what_cannot_be_fitted() -> None:
    def constant(values: dict[str, float]) -> np.ndarray:
        return np.full(3, values["a"])

    with refused(CostModelError, 1, 2):
        fit_parameters(constant, np.ones(1), {"a": 1.0, "b": 1.0})
    with refused(CostModelError, 0.0):
        fit_parameters(constant, np.array([1.0, 0.0, 1.0]), {"a": 1.0})
    limited = fit_parameters(constant, np.full(3, 5.0), {"a": 1.0}, {"a": 2.0})
    assert limited.values["a"] == pytest.approx(2.0)
    assert np.isnan(percentage_error(np.ones(2), np.ones(2), 5.0))
