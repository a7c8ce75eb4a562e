"""Products as training runs them, one after the other for a long time: what is left of the rates of the tables.

Data: products that SimuMax (Moore Threads, MIT) measured for its models of B200 and A100 PCIe, commit 4dcaae513b:
forward, of data and of weights, the latter added to a result in fp32 or bf16; and those of experts by Transformer
Engine, which launches them one by one. Rows of MI300X are backward passes of the products in kernels_gemm.csv, of data
and of weights together (AMD-AGI/Primus-Turbo, MIT), 100 of one shape in a row; those of MI350X are hipBLASLt's, on the
chip of MI355X at a lower power limit. To see what they say:

    python -m tests.validation.test_training_kernels
"""

import csv
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from costmodels import Array, matmul_time, weight_gradient_time
from hardware_profiles import POWER_EXPONENT, Device, load_profile, load_software
from tests.validation.test_kernel_tables import cold
from tests.validation.test_kernel_tables import rows as table

DATA = Path(__file__).parent / "data" / "kernels_training.csv"
LONG = 1e-3  # s; shorter ones are launched before the clock has fallen
LONGEST = 4e-3  # s, of the tables, whose kernels ran a few times each
LARGE = 1024  # extents
TABLES = ("a100-80gb", "h100-80gb", "h200-141gb", "gb200-186gb", "b300-288gb", "gb300-288gb")
GROUPED = 4e-6  # s a product


@cache
def rows(device: str) -> dict[str, Array]:
    with DATA.open(encoding="utf-8") as file:
        found = [row for row in csv.DictReader(file) if row["device"] == device]
    numbers = {name: np.array([float(row[name]) for row in found]) for name in ("groups", "m", "n", "k", "time_s")}
    return {**numbers, **{name: np.array([row[name] for row in found]) for name in ("pass", "result")}}


def predicted(columns: dict[str, Array], device: Device) -> Array:
    """Seconds of all rows, without what products launched one by one take beside."""
    m, n, k, groups = (columns[name] for name in ("m", "n", "k", "groups"))
    plain = np.asarray(matmul_time(m, n, k, groups, "bf16", device))
    added = np.asarray(weight_gradient_time(m, n, k, groups, "bf16", device, added=True))
    of_weights, wide = columns["pass"] == "weight", columns["result"] == "fp32"
    return np.where(of_weights & wide, added, plain)


def long_share(columns: dict[str, Array], device: Device, kept: Array) -> float:
    """Median of predicted over measured seconds of long single products."""
    kept = kept & (columns["groups"] == 1) & (columns["time_s"] >= LONG)
    return float(np.median((predicted(columns, device) / columns["time_s"])[kept]))


def shares(device: str, profile: str) -> tuple[float, float]:
    """The clock, and what is left of it where results are in fp32."""
    columns, device_of = rows(device), cold(load_profile(profile).device, "bf16")
    kernel = device_of.matmul_kernel("bf16")
    assert kernel is not None
    tried = replace(device_of, matmul_kernels=(("bf16", replace(kernel, added=1.0)),))
    wide = columns["result"] == "fp32"
    clock = long_share(columns, tried, ~wide)
    return clock, long_share(columns, tried, wide) / clock


@pytest.mark.parametrize(("device", "profile"), [("b200-sxm", "b200-180gb"), ("a100-pcie", "a100-80gb")])
def test_what_results_in_fp32_leave_is_what_the_packaged_profile_says(device: str, profile: str) -> None:
    kernel = load_profile(profile).device.matmul_kernel("bf16")
    assert kernel is not None
    assert kernel.added == pytest.approx(shares(device, profile)[1], abs=0.01)


def test_the_clock_of_b200_is_what_is_left_of_the_rates_of_its_table() -> None:
    kernel = load_profile("b200-180gb").device.matmul_kernel("bf16")
    assert kernel is not None
    assert kernel.clock == pytest.approx(shares("b200-sxm", "b200-180gb")[0], abs=0.01)


def test_the_clock_of_mi300x_is_what_forward_and_backward_passes_leave_of_the_fit() -> None:
    """Its table has the load of training: what is left is that backward passes are slower."""
    kernel = load_profile("mi300x-192gb").device.matmul_kernel("bf16")
    assert kernel is not None
    assert kernel.clock == pytest.approx(float(np.median(passes_of_mi300x())), abs=0.002)


def test_products_of_training_on_mi300x() -> None:
    kernel = load_profile("mi300x-192gb").device.matmul_kernel("bf16")
    assert kernel is not None
    assert np.mean(np.abs(passes_of_mi300x() / kernel.clock - 1.0)) <= 0.05


def test_mi350x_is_mi355x_at_the_power_limit_that_the_exponent_says() -> None:
    """1000 W for 1400: nothing is fitted to its products, of which all 217 are predicted at 0.99 in the median."""
    columns = rows("mi350x")
    device = replace(cold(load_profile("mi355x-288gb").device, "bf16"), power_share=1000 / 1400)
    share = predicted(columns, device) / columns["time_s"]
    assert np.median(share) == pytest.approx(1.0, abs=0.035)
    assert np.mean(np.abs(share - 1.0)) <= 0.11  # 0.08 over all of them
    unlimited = predicted(columns, replace(device, power_share=1.0)) / columns["time_s"]
    assert np.median(unlimited) < 0.93


def test_the_clock_of_mi355x_is_what_backward_passes_leave() -> None:
    """Of the layers that are packaged; the figure is the median of all of them."""
    columns = rows("mi350x")
    seconds = columns["time_s"][:12].reshape(4, 3)  # forward, of data, of weights
    assert list(columns["pass"][:3]) == ["forward", "data", "weight"]
    kernel = load_profile("mi355x-288gb").device.matmul_kernel("bf16")
    assert kernel is not None
    assert kernel.clock == pytest.approx(float(np.median(3 * seconds[:, 0] / seconds.sum(axis=1))), abs=0.03)


def passes_of_mi300x() -> Array:
    """Predicted over measured seconds of forward and backward passes together, without the clock."""
    backward, forward = rows("mi300x"), table("gemm", "mi300x-192gb", "bf16")
    device = cold(load_profile("mi300x-192gb").device, "bf16")
    m, n, k = (backward[name] for name in ("m", "n", "k"))
    count = len(m)
    assert all((forward[name][:count] == backward[name]).all() for name in ("m", "n", "k"))
    shapes = ((m, n, k), (m, k, n), (n, k, m))
    seconds = sum(np.asarray(matmul_time(rows, columns, depth, 1.0, "bf16", device)) for rows, columns, depth in shapes)
    return np.asarray(seconds / (forward["time_s"][:count] + backward["time_s"]))


def test_the_power_limit_of_the_pcie_board_costs_what_the_exponent_says() -> None:
    """300 W for 400: long products of the board over those of SXM, both over the same fit."""
    kernel = load_profile("a100-80gb").device.matmul_kernel("bf16")
    assert kernel is not None
    limited = shares("a100-pcie", "a100-80gb")[0] / kernel.clock
    assert limited == pytest.approx((300 / 400) ** POWER_EXPONENT, abs=0.02)


@pytest.mark.parametrize("profile", TABLES)
def test_clocks_are_what_the_longest_products_of_a_table_have(profile: str) -> None:
    """Of the part of the table that is packaged; the figures are medians of all of it."""
    columns, device = table("gemm", profile, "bf16"), load_profile(profile).device
    m, n, k, measured = (columns[name] for name in ("m", "n", "k", "time_s"))
    kept = (measured >= LONGEST) & (np.minimum(np.minimum(m, n), k) >= LARGE)
    kernel = device.matmul_kernel("bf16")
    assert kernel is not None
    assert kept.any()
    share = np.median((np.asarray(matmul_time(m, n, k, 1.0, "bf16", cold(device, "bf16"))) / measured)[kept])
    assert kernel.clock == pytest.approx(float(share), abs=0.06), (profile, int(kept.sum()))


@pytest.mark.parametrize(("device", "bar"), [("b200-sxm", 0.11), ("a100-pcie", 0.05)])
def test_products_of_experts_one_by_one(device: str, bar: float) -> None:
    assert load_software("megatron").grouped == load_software("nemo").grouped == GROUPED
    assert np.mean(np.abs(grouped_errors(device, GROUPED))) <= bar


def grouped_errors(device: str, each: float) -> Array:
    """Relative errors of the products of experts. The A100 board has the clock of its power limit."""
    columns = rows(device)
    profile = load_profile("b200-180gb" if device == "b200-sxm" else "a100-80gb").device
    if device == "a100-pcie":
        profile = replace(profile, power_share=300 / 400)
    several = columns["groups"] > 1
    seconds = predicted(columns, profile) + each * columns["groups"]
    return np.asarray(seconds / columns["time_s"] - 1)[several]


def main() -> None:
    """What the rows say."""
    for device, profile in (("b200-sxm", "b200-180gb"), ("a100-pcie", "a100-80gb")):
        print(device, "clock {:.3f}, results in fp32 {:.3f}".format(*shares(device, profile)))
        for each in (0.0, 4e-6, 5e-6, 6e-6, 7e-6):
            errors = grouped_errors(device, each)
            print(f"  {each * 1e6:.0f} us a product: {np.mean(np.abs(errors)):.1%}, bias {np.mean(errors):+.1%}")


if __name__ == "__main__":
    main()
