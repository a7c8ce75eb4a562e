"""The device that `make bench ONLY=overlap` imitates."""

import pytest
import torch
import torch.nn.functional as F

from planner.models.experts.grouped import grouped_outer, grouped_product
from tests.benchmarks.slow_device import SlowDevice

FAST = 1e18  # FLOP/s: nothing sleeps


def test_products_of_both_passes_take_their_flop() -> None:
    x, weight = torch.randn(3, 4, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    with SlowDevice(FAST) as device:
        torch.autograd.backward(F.linear(x, weight).sum())
    assert device.products == 3
    assert device.seconds * FAST == pytest.approx(3 * 2 * 12 * 8 * 16)


def test_attention_takes_its_flop_and_other_operators_nothing() -> None:
    heads = [torch.randn(2, 4, 6, 8, requires_grad=True) for _ in range(3)]
    with SlowDevice(FAST) as device:
        made = F.scaled_dot_product_attention(*heads)
        assert device.seconds * FAST == pytest.approx(2 * (2 * 4 * 6 * 6 * 8) * 2)
        torch.autograd.backward(F.silu(made).sum())
    assert device.seconds * FAST == pytest.approx(3.5 * 2 * (2 * 4 * 6 * 6 * 8) * 2)
    assert device.products == 2


def test_products_of_experts_take_their_flop_in_both_passes() -> None:
    rows, counts = torch.randn(6, 8, requires_grad=True), torch.tensor([4, 0, 2])
    matrices = torch.randn(3, 8, 16, requires_grad=True)
    with SlowDevice(FAST) as device:
        made = grouped_product(rows, matrices, counts)
        grouped_product(made.detach(), matrices.detach().transpose(1, 2), counts)
        grouped_outer(rows.detach(), made.detach(), counts)
    assert device.products == 3
    assert device.seconds * FAST == pytest.approx(3 * 2 * 6 * 8 * 16)


def test_numbers_are_those_without_it() -> None:
    left, right = torch.randn(5, 7), torch.randn(7, 3)
    with SlowDevice(FAST):
        assert torch.equal(left @ right, torch.mm(left, right))
    assert torch.equal(left @ right, torch.mm(left, right))
