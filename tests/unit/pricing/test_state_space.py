"""What the scans of state-space models take."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from costmodels import (
    SelectiveScanShape,
    StateSpaceShape,
    best_rate,
    matmul_time,
    operator_time,
    selective_scan_backward_time,
    selective_scan_time,
    state_space_backward_time,
    state_space_time,
)
from hardware_profiles import load_profile
from planner.graph.operators.recomputed import Recomputed
from planner.graph.operators.selective_scan import selective_scan
from planner.graph.operators.state_space_scan import state_space_scan
from planner.sharding.rule import Rule
from runtime.auditing.ledger import Ledger
from tests.contract.rule_calls import Example
from tests.unit.pricing.test_delta_rule import Counted

DEVICE = load_profile("h100-80gb").with_devices(8).device
HEADS = StateSpaceShape(batch=8, steps=4096, heads=80, groups=1, width=64, state=128, chunk=256)
CHANNELS = SelectiveScanShape(batch=8, channels=8192, steps=4096, state=16)
TIMES = {
    "state_space": (HEADS, state_space_time, state_space_backward_time),
    "selective_scan": (CHANNELS, selective_scan_time, selective_scan_backward_time),
}


def heads(steps: int, chunk: int) -> list[Any]:
    wide, few = torch.zeros(1, steps, 4, 48), torch.zeros(1, steps, 2, 40)
    return [wide, wide[..., 0], *[torch.zeros(4)], few, few, torch.zeros(4), torch.zeros(4), True, 0.0, None, chunk]


def channels(steps: int) -> list[Any]:
    wide, read = torch.zeros(1, 8, steps), torch.zeros(1, 16, steps)
    return [wide, wide, torch.zeros(8, 16), read, read, torch.zeros(8), wide, torch.zeros(8), True]


def work_of(found: Rule) -> float:
    return sum(term.coefficient * found.whole_extent(term.factors) for term in found.work)


def test_work_is_linear_in_the_steps() -> None:
    """For each step pairs of a group, what heads read of their chunk, and what they read and write of a state."""
    few, many = (Example("planner.state_space_scan.default", tuple(heads(steps, 64))).rule() for steps in (128, 256))
    assert work_of(many) == 2 * work_of(few) == 2 * 128 * (2 * 64 * (2 * 40 + 4 * 48) + 4 * 4 * 48 * 40)
    few, many = (Example("planner.selective_scan.default", tuple(channels(steps))).rule() for steps in (64, 128))
    assert work_of(many) == 2 * work_of(few) == 2 * 64 * 9 * 8 * 16


def counted(operator: Recomputed, given: list[Any]) -> tuple[Counted, Counted]:
    found = []
    for composed, operands in (
        (operator.composed, given),
        (operator.composed_backward, [operator.composed(*given), *given]),
    ):
        with Counted() as count:
            composed(*operands)
        found.append(count)
    return found[0], found[1]


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("steps", [128, 512])
def test_what_it_is_composed_of_is_counted(name: str, steps: int) -> None:
    """Launches and passes over memory grow with the steps, not with their square."""
    device = replace(DEVICE, launch_latency=0.0)
    if name == "state_space":
        counts, shape = (
            counted(state_space_scan, heads(steps, 64)),
            StateSpaceShape(batch=1, steps=steps, heads=4, groups=2, width=48, state=40, chunk=64, composed=True),
        )
    else:
        counts, shape = (
            counted(selective_scan, channels(steps)),
            SelectiveScanShape(batch=1, channels=8, steps=steps, state=16, composed=True),
        )
    for time, count, launched, products in zip(TIMES[name][1:], counts, shape.launched, (1, 3), strict=True):
        assert count.launched == pytest.approx(launched, rel=0.1)
        one = operator_time(op_class="elementwise", flops=0.0, bytes_moved=4.0, dtype="fp32", device=device)
        apart = products * multiplied(device, steps) if name == "state_space" else 0.0
        assert (time(shape, "fp32", device) - apart) / one == pytest.approx(count.elements, rel=0.15)


def multiplied(device: Any, steps: int) -> float:
    """Seconds of products with a matrix for each of four heads, or of two groups, and chunk; of the third there are two
    thirds backward, which is less than a percent here."""
    extents = ((64, 64, 40, 2), (64, 48, 64, 4), (40, 48, 64, 4), (64, 48, 40, 4))
    return sum(float(matmul_time(m, n, k, batch * steps / 64, "fp32", device)) for m, n, k, batch in extents)


def test_a_measured_kernel() -> None:
    """Of an H800, 8 samples of 4,096 steps: 0.645 ms for what is read of a chunk and of the states before it, by the
    quickest of several kernels. Those that are priced are no quicker, and not twice as slow."""
    found = sum(float(matmul_time(256, 64, depth, 8 * 16 * 80, "bf16", DEVICE)) for depth in (256, 128))
    assert 0.645e-3 < found < 2 * 0.645e-3


@pytest.mark.parametrize("name", TIMES)
def test_an_audit_counts_the_work_of_the_rule(name: str) -> None:
    """Forward, and three times as much backward."""
    operator, given = (state_space_scan, heads(128, 64)) if name == "state_space" else (selective_scan, channels(128))
    given = [one.clone().requires_grad_() if isinstance(one, torch.Tensor) else one for one in given]
    with Ledger() as ledger:
        operator(*given).sum().backward()
    rule = Example(f"planner.{name.removesuffix('_scan')}_scan.default", tuple(given)).rule()
    assert sum(ledger.flops.values()) == 4 * work_of(rule)


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize(
    ("name", "extent"),
    [(name, extent) for name, (shape, *_) in TIMES.items() for extent in type(shape).__slots__ if extent not in
     ("chunk", "composed", "again", "groups")],
)  # fmt: skip
def test_laws(name: str, extent: str, composed: bool) -> None:
    """Monotone, subadditive in what is independent, and nothing beats the work at the best rate."""
    shape, *times = TIMES[name]
    shape = replace(shape, composed=composed)
    each = 2 * 256 * (128 + 80 * 64) + 4 * 80 * 64 * 128 if name == "state_space" else 9 * 8192 * 16
    measured: Callable[..., Any]
    for measured, passes in zip(times, (1.0, 2.5), strict=True):
        base = measured(shape, "bf16", DEVICE)
        assert base >= passes * 8 * 4096 * each / best_rate(name, "bf16", DEVICE) or composed
        assert base <= measured(replace(shape, **{extent: 3 * getattr(shape, extent)}), "bf16", DEVICE)
        assert measured(replace(shape, **{extent: 3 * getattr(shape, extent)}), "bf16", DEVICE) <= 3 * base * 1.001
        assert measured(replace(shape, again=True), "bf16", DEVICE) >= base
