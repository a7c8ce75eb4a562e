"""What the gated delta rule takes."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from costmodels import DeltaRuleShape, best_rate, delta_rule_backward_time, delta_rule_time, operator_time
from hardware_profiles import load_profile
from planner.graph.delta_rule import gated_delta_rule
from planner.sharding.rule import Rule
from runtime.auditing.ledger import Ledger
from tests.contract.rule_calls import Example

DEVICE = load_profile("h100-80gb").with_devices(8).device
SHAPE = DeltaRuleShape(batch=8, steps=4096, heads=32, keys=128, values=128, chunk=64)
COMPOSED = replace(SHAPE, composed=True, channels=True)


def rule(steps: int) -> Rule:
    pieces = [torch.zeros(2, steps, 4, 8), torch.zeros(2, steps, 4, 8), torch.zeros(2, steps, 8, 16)]
    return Example("planner.gated_delta_rule.default", (*pieces, *[torch.zeros(2, steps, 8)] * 2), {}).rule()


def work_of(found: Rule) -> float:
    return sum(term.coefficient * found.whole_extent(term.factors) for term in found.work)


def test_work_is_linear_in_the_steps() -> None:
    assert work_of(rule(256)) == 2 * work_of(rule(128)) == 2 * 2 * 128 * 8 * (5 * 64 * 8 + 3 * 64 * 16 + 6 * 8 * 16)


class Counted(TorchDispatchMode):
    """Operators that are no views, and the elements that they read and write but for products."""

    def __init__(self) -> None:
        super().__init__()
        self.launched, self.elements = 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        given, results = (
            [one for one in torch.utils._pytree.tree_leaves(tree) if isinstance(one, torch.Tensor)]
            for tree in (args, made)
        )
        known = {one.untyped_storage().data_ptr() for one in given}
        if any(one.untyped_storage().data_ptr() in known for one in results) and not func._schema.is_mutable:
            return made
        self.launched += 1
        if func._schema.name.split("::")[1] not in ("bmm", "linalg_solve_triangular"):
            self.elements += sum(one.numel() for one in (*given, *results))
        return made


def test_an_audit_counts_its_products() -> None:
    """Forward, and three times as many backward, with the usual chunk and another."""
    wide = torch.zeros(1, 128, 2, 4)
    for chunk in (64, 32):
        leaves = [one.requires_grad_() for one in (wide.clone(), wide.clone(), wide.clone(), wide[..., 0].clone())]
        with Ledger() as ledger:
            gated_delta_rule(*leaves, wide[..., 0], True, chunk).sum().backward()
        each = 128 * 2 * (5 * chunk * 4 + 3 * chunk * 4 + 6 * 4 * 4)
        assert sum(ledger.flops.values()) == 4 * each


def counted(steps: int, channels: bool) -> tuple[Counted, Counted]:
    """Of 2 heads, forward and backward, below the operator."""
    wide = torch.zeros(1, steps, 2, 48)
    given = [wide, wide, torch.zeros(1, steps, 2, 40), wide if channels else wide[..., 0], wide[..., 0]]
    found = []
    for composed, operands in (
        (gated_delta_rule.composed, given),
        (gated_delta_rule.composed_backward, [given[2], *given]),
    ):
        with Counted() as count:
            composed(*operands, True, 64)
        found.append(count)
    return found[0], found[1]


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("steps", [64, 256])
def test_what_it_is_composed_of_is_counted(steps: int, channels: bool) -> None:
    """Launches and passes over memory grow with the steps, not with their square."""
    shape = DeltaRuleShape(
        batch=1, steps=steps, heads=2, keys=48, values=40, chunk=64, channels=channels, composed=True
    )
    times = (delta_rule_time, delta_rule_backward_time)
    device = replace(DEVICE, launch_latency=0.0)
    for time, count, launched in zip(times, counted(steps, channels), shape.launched, strict=True):
        assert count.launched == pytest.approx(launched, rel=0.1)
        few = time(replace(shape, composed=False), "fp32", device)
        assert time(shape, "fp32", device) > few
        assert count.elements / (2 * steps) == pytest.approx(elements(shape, time), rel=0.1)


def elements(shape: DeltaRuleShape, time: Callable[..., Any]) -> float:
    """Those that pass for a step of a head, from times: beside what one kernel reads and writes."""
    device, each = replace(DEVICE, launch_latency=0.0), shape.batch * shape.steps * shape.heads
    one = operator_time(op_class="elementwise", flops=0.0, bytes_moved=4.0 * each, dtype="fp32", device=device)
    own = (4 * shape.keys + 3 * shape.values) * (1 if time is delta_rule_time else 2)
    return float((time(shape, "fp32", device) - time(replace(shape, composed=False), "fp32", device)) / one + own)


@pytest.mark.parametrize("extent", ["batch", "steps", "heads", "keys", "values"])
def test_laws(extent: str) -> None:
    """Monotone, subadditive in what is independent, and nothing beats the work at the best rate."""
    cases = product((SHAPE, COMPOSED), ((delta_rule_time, 1.0), (delta_rule_backward_time, 3.0)))
    for shape, (time, passes) in cases:
        base = time(shape, "bf16", DEVICE)
        each = 5 * 64 * 128 + 3 * 64 * 128 + 6 * 128 * 128
        assert base >= passes * 8 * 4096 * 32 * each / best_rate("delta_rule", "bf16", DEVICE)
        assert base <= time(replace(shape, **{extent: 3 * getattr(shape, extent)}), "bf16", DEVICE) <= 3 * base * 1.001
