"""What the gated delta rule takes."""

from dataclasses import replace

import pytest
import torch

from costmodels import DeltaRuleShape, best_rate, delta_rule_backward_time, delta_rule_time
from hardware_profiles import load_profile
from planner.sharding.rule import Rule
from tests.contract.rule_calls import Example

DEVICE = load_profile("h100-80gb").with_devices(8).device
SHAPE = DeltaRuleShape(batch=8, steps=4096, heads=32, keys=128, values=128, chunk=64)


def rule(steps: int) -> Rule:
    pieces = [torch.zeros(2, steps, 4, 8), torch.zeros(2, steps, 4, 8), torch.zeros(2, steps, 8, 16)]
    return Example("planner.gated_delta_rule.default", (*pieces, *[torch.zeros(2, steps, 8)] * 2), {}).rule()


def work_of(found: Rule) -> float:
    return sum(term.coefficient * found.whole_extent(term.factors) for term in found.work)


def test_work_is_linear_in_the_steps() -> None:
    assert work_of(rule(256)) == 2 * work_of(rule(128)) == 2 * 2 * 128 * 8 * (5 * 64 * 8 + 3 * 64 * 16 + 6 * 8 * 16)


@pytest.mark.parametrize("extent", ["batch", "steps", "heads", "keys", "values"])
def test_laws(extent: str) -> None:
    """Monotone, subadditive in what is independent, and nothing beats the work at the best rate."""
    for time, passes in ((delta_rule_time, 1.0), (delta_rule_backward_time, 3.0)):
        base = time(SHAPE, "bf16", DEVICE)
        each = 5 * 64 * 128 + 3 * 64 * 128 + 6 * 128 * 128
        assert base >= passes * 8 * 4096 * 32 * each / best_rate("delta_rule", "bf16", DEVICE)
        assert base <= time(replace(SHAPE, **{extent: 3 * getattr(SHAPE, extent)}), "bf16", DEVICE) <= 3 * base * 1.001
