"""Widths of heads that no kernel is compiled for."""

from dataclasses import replace

import pytest

from costmodels import AttentionShape, attention_time
from hardware_profiles import load_profile

DEVICE = load_profile("a100-80gb").device
SHAPE = AttentionShape(
    batch=4, heads=16, key_heads=16, queries=4096, keys=4096, head_dim=128, value_dim=128, causal=True
)


def seconds(width: int) -> float:
    return float(attention_time(replace(SHAPE, head_dim=width, value_dim=width), "bf16", DEVICE))


@pytest.mark.parametrize(("width", "kernel"), [(72, 96), (150, 192), (200, 256), (300, 320)])
def test_a_head_takes_the_time_of_the_next_kernel(width: int, kernel: int) -> None:
    assert seconds(width) == pytest.approx(seconds(kernel), rel=0.01)
    assert seconds(width) > 1.05 * seconds(width * 3 // 4)
