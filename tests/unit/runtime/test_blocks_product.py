"""Scales of blocks of 128 as the kernel of Hopper reads them, and what decides on kernels."""

import pytest
import torch

from planner.models.fp8_experts import blocks_of, largest
from runtime.ops.blocks_product import has_blocks_product, in_fours, scales_of_rows, scales_of_weight
from runtime.ops.narrow_casts import has_narrow_cast

LOW = torch.float8_e4m3fn
TOP = torch.finfo(LOW).max


def test_scales_of_rows_are_those_of_the_product_in_fp32_and_lie_block_after_block() -> None:
    rows = torch.randn(48, 384).bfloat16()
    blocks = blocks_of(384, 0, 0, rows.device)
    found = scales_of_rows(rows, LOW)
    assert torch.equal(found, largest(rows, None, 0, blocks.at, blocks.cells) / TOP)
    assert found.dtype == torch.float32
    assert found.stride() == (1, 48)


@pytest.mark.parametrize("turned", [False, True])
def test_scales_of_a_weight_are_padded_to_fours(turned: bool) -> None:
    weight = torch.randn(256, 640).bfloat16()
    weight = weight.t() if turned else weight
    outside, inside = (blocks_of(extent, 0, 0, weight.device) for extent in weight.shape)
    found = scales_of_weight(weight)
    assert torch.equal(found, largest(weight, outside.at, outside.cells, inside.at, inside.cells) / TOP)
    read = in_fours(found)
    lines = -(-found.shape[1] // 4) * 4
    assert read.shape == (lines, found.shape[0])
    assert read.stride() == (1, lines)
    assert torch.equal(read[: found.shape[1]].t(), found)
    assert not read[found.shape[1] :].any()


def test_a_zero_weight_has_scales() -> None:
    assert scales_of_weight(torch.zeros(128, 128)).gt(0).all()


def test_cpus_multiply_and_round_with_operators_of_torch() -> None:
    rows, weight = torch.zeros(16, 128).bfloat16(), torch.zeros(128, 128).bfloat16()
    assert not has_blocks_product(rows, weight)
    assert not has_narrow_cast(rows)
