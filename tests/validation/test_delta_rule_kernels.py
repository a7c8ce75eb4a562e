"""Kernels of the gated delta rule on an H200, of fla 0.5.1: benchmark/benchmark_results_H200.txt of
QwenLM/FlashQLA@c18a486, in bf16 with heads of 128. Queries and keys were brought to length 1 before, which is taken
off."""

import pytest

from costmodels import DeltaRuleShape, delta_rule_backward_time, delta_rule_time, operator_time
from hardware_profiles import load_profile

DEVICE = load_profile("h200-141gb").with_devices(1).device
FORWARD = [  # sequences, steps of each, heads of values, milliseconds
    (1, 32768, 8, 0.902), (1, 8192, 8, 0.234), (4, 8192, 8, 0.467), (8, 4096, 8, 0.471), (1, 32768, 16, 1.241),
    (1, 16384, 16, 0.614), (1, 8192, 16, 0.316), (8, 4096, 16, 0.945), (1, 32768, 24, 1.556), (1, 32768, 32, 1.885),
    (1, 8192, 32, 0.466), (8, 1024, 32, 0.493), (1, 32768, 48, 2.711), (1, 8192, 48, 0.665), (1, 32768, 64, 3.331),
    (1, 8192, 64, 0.814), (8, 4096, 64, 3.390), (8, 1024, 64, 0.854),
]  # fmt: skip
BACKWARD = [
    (1, 8192, 32, 1.444), (4, 2048, 32, 1.467), (8, 1024, 32, 1.500), (1, 32768, 32, 5.697), (2, 16384, 32, 5.708),
    (8, 4096, 32, 5.781), (1, 8192, 16, 0.957), (4, 2048, 16, 0.830), (1, 32768, 16, 3.701), (2, 16384, 16, 3.323),
    (4, 8192, 16, 3.093), (8, 4096, 16, 2.973), (1, 32768, 8, 2.743), (2, 16384, 8, 2.360), (4, 8192, 8, 1.739),
    (8, 4096, 8, 1.727), (1, 32768, 4, 2.311), (2, 16384, 4, 1.906), (8, 4096, 4, 1.057),
]  # fmt: skip


def off(passes: int, batch: int, steps: int, heads: int, measured: float) -> float:
    """Predicted over measured. To bring queries and keys to length 1 takes 4 elements of a key, 6 backward."""
    shape = DeltaRuleShape(batch=batch, steps=steps, heads=heads, keys=128, values=128, chunk=64)
    apart = operator_time(
        op_class="elementwise",
        flops=0.0,
        bytes_moved=2.0 * passes * batch * steps * heads * 128,
        dtype="bf16",
        device=DEVICE,
    )
    time = delta_rule_time if passes == 4 else delta_rule_backward_time
    return float(time(shape, "bf16", DEVICE) - apart) / (measured * 1e-3)


def test_forward() -> None:
    found = [off(4, *row) for row in FORWARD]
    assert found == pytest.approx([1.0] * len(found), abs=0.2)
    assert sum(found) / len(found) == pytest.approx(1.0, abs=0.1)


def test_backward() -> None:
    found = {row: off(6, *row) for row in BACKWARD}
    many = [share for (_, _, heads, _), share in found.items() if heads >= 16]
    assert many == pytest.approx([1.0] * len(many), abs=0.2)
    assert list(found.values()) == pytest.approx([1.0] * len(found), abs=0.35)
