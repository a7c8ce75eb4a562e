"""Linear layers in fp8 with a scale for each tensor on MI300X: products and the casts before them.

Data: AMD-AGI/Primus-Turbo (MIT) at 03b9a8097530, gemm_turbo_fp8_tensorwise_20260309_MI300X.csv: seconds of a layer
forward and backward, from the published TFLOP/s. Forward, both operands are read for their largest elements, read
again, and written in fp8; backward, the gradient of the result is, and two products follow. `convert` of the kernel is
the bandwidth of these casts; what memory and parts of k cost is that of bf16, because no product is small.
"""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from costmodels import Array, matmul_time
from costmodels.fit import fit_parameters
from hardware_profiles import MatmulKernel, load_profile

DATA = Path(__file__).parent / "data" / "kernels_tensorwise.csv"
CAST = 2 + 2 + 1  # bytes of an element: the largest is found, then it is cast
START = {"compute": 0.4, "feed": 1.3e13, "fill": 50.0, "quantisation": 0.3, "convert": 3.7e12}
MOST = {"compute": 1.0, "quantisation": 1.0}


def columns() -> dict[str, Array]:
    with DATA.open(encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    return {name: np.array([float(row[name]) for row in found]) for name in found[0]}


def packaged(dtype: str) -> MatmulKernel:
    kernel = load_profile("mi300x-192gb").device.matmul_kernel(dtype)
    assert kernel is not None
    return kernel


def seconds(kernel: MatmulKernel, *, backward: bool = False) -> Array:
    """Of all rows, forward or backward."""
    device = replace(load_profile("mi300x-192gb").device, matmul_kernels=(("fp8", kernel),))
    m, n, k = (columns()[name] for name in ("m", "n", "k"))
    assert kernel.convert is not None
    shapes = ((m, k, n), (n, k, m)) if backward else ((m, n, k),)
    products = [np.asarray(matmul_time(*shape, 1.0, "fp8", device, converted=0.0)) for shape in shapes]
    cast = m * n if backward else (m + n) * k
    return np.asarray(sum(products) + CAST * cast / kernel.convert)


def test_the_packaged_kernel_is_the_fit_of_the_forward_passes() -> None:
    bare = replace(packaged("bf16"), clock=1.0)
    measured = columns()["forward_s"]
    fit = fit_parameters(lambda values: seconds(replace(bare, **values)), measured, START, MOST)
    kernel = packaged("fp8")
    assert kernel.convert is not None
    for name in START:
        assert getattr(kernel, name) == pytest.approx(fit.values[name], rel=0.01), name
    assert kernel.spread == pytest.approx(fit.spread, rel=0.01)
    assert (kernel.bandwidth, kernel.launch, kernel.split) == (bare.bandwidth, bare.launch, bare.split)
    assert np.mean(np.abs(seconds(replace(kernel, clock=1.0)) / measured - 1.0)) <= 0.03


def test_the_clock_is_what_three_passes_leave() -> None:
    kernel = replace(packaged("fp8"), clock=1.0)
    rows = columns()
    share = (seconds(kernel) + seconds(kernel, backward=True)) / (rows["forward_s"] + rows["backward_s"])
    assert packaged("fp8").clock == pytest.approx(float(np.median(share)), abs=0.002)
    share = seconds(packaged("fp8")) + seconds(packaged("fp8"), backward=True)
    assert np.mean(np.abs(share / (rows["forward_s"] + rows["backward_s"]) - 1.0)) <= 0.05
