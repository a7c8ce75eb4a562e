from dataclasses import replace

import numpy as np
import pytest

from costmodels import (
    PLAIN_UPDATE,
    CostModelError,
    UpdateVariant,
    optimizer_traffic,
    parameter_bytes,
    peak_memory,
    reserved_memory,
    usable_memory,
)
from hardware_profiles import GIB, PYTORCH, load_profile
from tests.refusals import refused


@pytest.mark.parametrize(
    ("precision", "optimizer", "expected", "traffic"),
    [
        ("bf16", "adamw", (2, 4, 12), 30),
        ("fp16", "adamw", (2, 4, 12), 30),
        ("bf16", "sgd", (2, 4, 8), 22),
        ("fp32", "adamw", (4, 4, 8), 28),
        ("fp32", "sgd", (4, 4, 4), 20),
    ],
)
def test_bytes_per_parameter(precision: str, optimizer: str, expected: tuple[int, int, int], traffic: int) -> None:
    found = parameter_bytes(precision, optimizer)
    assert (found.weight, found.gradient, found.state) == expected
    assert found.total == sum(expected)
    assert optimizer_traffic(precision, optimizer) == traffic


@pytest.mark.parametrize(
    ("precision", "optimizer", "variant", "expected", "traffic"),
    [
        ("bf16", "lamb", PLAIN_UPDATE, (2, 4, 12), 42),
        ("bf16", "adamw", UpdateVariant(narrow_gradients=True), (2, 2, 12), 28),
        ("bf16", "adamw", UpdateVariant(master_weights=False), (2, 4, 8), 24),
        ("bf16", "sgd", UpdateVariant(narrow_gradients=True, master_weights=False), (2, 2, 4), 14),
        ("bf16", "adamw", UpdateVariant(clipped=True), (2, 4, 12), 42),
        ("bf16", "adamw", UpdateVariant(moment_dtype="bf16"), (2, 4, 8), 22),
        ("fp32", "muon", UpdateVariant(moment_dtype="bf16"), (4, 4, 2), 44),
        (
            "bf16",
            "adamw",
            UpdateVariant(narrow_gradients=True, master_weights=False, moment_dtype="bf16"),
            (2, 2, 4),
            14,
        ),
        ("fp32", "adamw", UpdateVariant(narrow_gradients=True, master_weights=False), (4, 4, 8), 28),
    ],
)
def test_variants(
    precision: str, optimizer: str, variant: UpdateVariant, expected: tuple[int, int, int], traffic: int
) -> None:
    found = parameter_bytes(precision, optimizer, variant=variant)
    assert (found.weight, found.gradient, found.state) == expected
    assert optimizer_traffic(precision, optimizer, variant) == traffic


@pytest.mark.parametrize(
    ("precision", "variant", "traffic"),
    [
        ("bf16", PLAIN_UPDATE, 82),
        ("fp32", PLAIN_UPDATE, 80),
        ("fp32", UpdateVariant(clipped=True), 92),
        ("bf16", UpdateVariant(clipped=True, narrow_gradients=True), 94),
        ("bf16", UpdateVariant(clipped=True, narrow_gradients=True, master_weights=False), 74),
        ("bf16", UpdateVariant(narrow_gradients=True, master_weights=False, moment_dtype="bf16"), 40),
    ],
)
def test_adam_operator_by_operator_moves_80_bytes(precision: str, variant: UpdateVariant, traffic: int) -> None:
    assert optimizer_traffic(precision, "adamw", variant, foreach=True) == traffic
    assert optimizer_traffic(precision, "adamw", variant, foreach=True, widened=True) == traffic
    assert optimizer_traffic(precision, "sgd", variant, foreach=True) == optimizer_traffic(precision, "sgd", variant)


def test_what_is_widened_for_a_kernel_passes_twice_more() -> None:
    """Through memory in fp32: written and read before the kernel, written and read behind it."""
    narrow = UpdateVariant(moment_dtype="bf16", master_weights=False)
    found = [optimizer_traffic("bf16", "adamw", one, widened=True) for one in (narrow, PLAIN_UPDATE)]
    assert found == [optimizer_traffic("bf16", "adamw", narrow) + 3 * 16, optimizer_traffic("bf16", "adamw")]


def test_unknown_words_raise() -> None:
    with refused(CostModelError, "fp8", "bf16", "fp32"):
        optimizer_traffic("bf16", "adamw", UpdateVariant(moment_dtype="fp8"))
    with refused(CostModelError, "fp8", "bf16", "fp16", "fp32"):
        parameter_bytes("fp8", "adamw")
    with refused(CostModelError, "lion", "adamw", "sgd"):
        optimizer_traffic("bf16", "lion")


def test_usable_memory_is_what_just_fits() -> None:
    device = load_profile("a100-80gb").device
    usable = usable_memory(device)
    assert peak_memory(usable, 0.0, 0.0, device) == pytest.approx(device.memory)
    assert usable == pytest.approx((device.memory - 3.7 * GIB) / 1.04)


def test_peak_memory_of_arrays() -> None:
    device = load_profile("a100-80gb").device
    peaks = peak_memory(np.array([0.0, 1e9]), np.array([0.0, 2e9]), np.array([0.0, 3e9]), device)
    assert peaks == pytest.approx([device.reserved, device.reserved + 6e9 * 1.04])


def test_what_is_reserved_follows_the_process_groups() -> None:
    device = load_profile("a100-80gb").device
    assert reserved_memory(device) == device.reserved
    assert reserved_memory(device, replace(PYTORCH, communicators=0.0)) == 0.5 * GIB
    one = reserved_memory(device, replace(PYTORCH, communicators=0.2))
    assert one == pytest.approx(0.5 * GIB + 0.2 * 3.2 * GIB)
