"""What the gated delta rule takes."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from costmodels import (
    DeltaRuleShape,
    best_rate,
    delta_rule_backward_time,
    delta_rule_time,
    matmul_time,
    operator_time,
)
from hardware_profiles import Device, load_profile, load_software
from planner.graph.operators.delta_rule import gated_delta_rule
from planner.pricing.kernels.call import KernelCall
from planner.pricing.kernels.seconds import kernel_seconds
from planner.pricing.operator_price import price_operator
from planner.sharding.mesh import Mesh
from planner.sharding.rule import Rule
from runtime.auditing.ledger import Ledger
from tests.contract.rule_calls import Example

DEVICE = load_profile("h100-80gb").with_devices(8).device
SHAPE = DeltaRuleShape(batch=8, steps=4096, heads=32, keys=128, values=128, chunk=64)
KINDS = [
    replace(SHAPE, composed=composed, channels=channels) for composed in (False, True) for channels in (False, True)
]


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
    device = replace(DEVICE, launch_latency=0.0)
    one = operator_time(op_class="elementwise", flops=0.0, bytes_moved=4.0, dtype="fp32", device=device)
    times = (delta_rule_time, delta_rule_backward_time)
    for time, count, launched, products in zip(times, counted(steps, channels), shape.launched, (1, 3), strict=True):
        assert count.launched == pytest.approx(launched, rel=0.1)
        passed = (time(shape, "fp32", device) - products * multiplied(device, steps)) / one
        assert count.elements == pytest.approx(passed, rel=0.1)


def multiplied(device: Device, steps: int) -> float:
    """Seconds of products with a matrix for each of two heads and chunk: pairs, the triangle, what is read and
    written."""
    extents = ((64, 64, 48), (64, 64, 48), (64, 88, 64), (64, 40, 64), (64, 40, 48), (64, 40, 48), (48, 40, 64))
    return sum(float(matmul_time(m, n, k, 2 * steps / 64, "fp32", device)) for m, n, k in extents)


@pytest.mark.parametrize("extent", ["batch", "steps", "heads", "keys", "values"])
def test_laws(extent: str) -> None:
    """Monotone, subadditive in what is independent, and nothing beats the work at the best rate."""
    cases = product(KINDS, ((delta_rule_time, 1.0), (delta_rule_backward_time, 3.0)))
    for shape, (time, passes) in cases:
        base = time(shape, "bf16", DEVICE)
        each = 5 * 64 * 128 + 3 * 64 * 128 + 6 * 128 * 128
        assert base >= passes * 8 * 4096 * 32 * each / best_rate("delta_rule", "bf16", DEVICE)
        assert base <= time(replace(shape, **{extent: 3 * getattr(shape, extent)}), "bf16", DEVICE) <= 3 * base * 1.001
        assert time(replace(shape, again=True), "bf16", DEVICE) >= base


def test_few_walk_along_a_sequence_as_long_as_many() -> None:
    """Forward 512 chunks of 1.2 us, however few heads; from a block for each unit on as the heads."""
    one, few, many = (
        delta_rule_time(replace(SHAPE, batch=1, steps=32768, heads=heads), "bf16", DEVICE) for heads in (1, 8, 128)
    )
    assert 512 * 1.2e-6 < one < few < 2 * one
    assert many > 8 * few


def test_an_operator_is_priced_as_what_computes_it() -> None:
    """On a GPU kernels, and the forward pass again where our runtime calls them; elsewhere PyTorch's operators."""
    found = rule(4096)
    seconds = {}
    for stack, kind in product(("pytorch", "megatron"), ("cuda", "cpu")):
        call = KernelCall(
            rule=found,
            extents=np.array([[factor.extent for factor in found.factors]], dtype=np.float64),
            dtype="bf16",
            device=replace(DEVICE, device_type=kind),
            software=load_software(stack),
            graded=(0, 1, 2, 3, 4),
            flops=np.ones(1),
            moved=np.ones(1),
            moved_backward=np.ones(1),
            hops=np.ones(1),
            uneven=np.ones(1),
        )
        seconds[stack, kind] = [float(each[0]) for each in kernel_seconds(call)]
    (ahead, behind), (_, without) = seconds["pytorch", "cuda"], seconds["megatron", "cuda"]
    assert behind == pytest.approx(without + ahead)
    assert seconds["megatron", "cpu"] == seconds["megatron", "cuda"]
    assert seconds["pytorch", "cpu"][0] > 2 * ahead


def test_what_lives_is_that_of_what_computes_it() -> None:
    """Kernels keep tensors of 16 bits between them; composed, more of them live at once, in float32."""
    wide = torch.zeros(1, 256, 4, 32, dtype=torch.bfloat16)
    example = Example("planner.gated_delta_rule.default", (wide, wide, wide, wide[..., 0].float(), wide[..., 0]), {})
    found, call, machine = example.rule(), example.call(), load_profile("h100-80gb").with_devices(1)
    needed = []
    for composes in (False, True):
        cluster = machine.with_software(replace(machine.software, composes_scans=composes))
        prices = price_operator(found, [()], call.operands, call.results, [True] * 5, Mesh(axes=()), cluster)
        needed.append(float(prices.transient[0]))
    assert needed[1] > 1.5 * needed[0]
