"""Scales of steps before, on one device: which elements they are of, and when they change."""

import pytest
import torch

from planner.fp8_recipes import EXPERT_TENSORS, RECIPES
from planner.graph.fp8 import Fp8
from planner.models.experts.delayed import DelayedProducts
from planner.models.experts.rows import Matrices, activation_of, differentiate_experts, run_experts
from runtime.ops.fp8.delayed_scales import GRADIENT, INPUT, WEIGHT, DelayedScales
from runtime.ops.fp8.fp8_linear import fp8_linear

CPU = torch.device("cpu")
E4M3, E5M2 = 448.0, 57344.0


def scales(history: int = 2, margin: int = 0) -> DelayedScales:
    return DelayedScales({"w": (3,), "v": (3,)}, Fp8(recipe="delayed", history=history, margin=margin), CPU)


def test_a_scale_is_of_the_largest_element_of_the_steps_before() -> None:
    every = scales()
    layer = every.of("v")
    assert float(layer.scale(INPUT)) == 1.0  # nothing is known before the first step ends
    for largest in (2.0, 8.0, 4.0):
        layer.see(INPUT, torch.tensor([-largest, 1.0]))
        layer.see(INPUT, torch.tensor([largest / 2]))  # of another micro-batch
        every.end_step()
    assert every.history_of("v")[INPUT].tolist() == [4.0, 8.0]
    assert float(layer.scale(INPUT)) == pytest.approx(8.0 / E4M3)
    every.end_step()
    every.end_step()  # two steps later 8 is forgotten, and so is all else
    assert float(layer.scale(INPUT)) == 1.0
    assert float(every.of("w").scale(INPUT)) == 1.0


def test_gradients_have_another_range_and_a_margin_leaves_powers_of_two_free() -> None:
    every = scales(margin=3)
    every.of("w").see(GRADIENT, torch.tensor([7.0]))
    every.of("w").see(WEIGHT, torch.tensor([7.0]))
    every.end_step()
    assert float(every.of("w").scale(GRADIENT)) == pytest.approx(8 * 7.0 / E5M2)
    assert float(every.of("w").scale(WEIGHT)) == pytest.approx(8 * 7.0 / E4M3)


def test_a_step_that_is_not_made_and_what_is_not_finite_leave_scales_alone() -> None:
    every = scales()
    layer = every.of("w")
    layer.see(INPUT, torch.tensor([3.0]))
    every.forget()
    every.end_step()
    assert float(layer.scale(INPUT)) == 1.0
    layer.see(INPUT, torch.tensor([5.0]))
    every.end_step()
    layer.see(INPUT, torch.tensor([float("inf")]))
    every.end_step()
    assert float(layer.scale(INPUT)) == pytest.approx(5.0 / E4M3)


def test_evaluation_reads_scales_and_adds_nothing() -> None:
    every = scales()
    x, weight = torch.randn(4, 16), torch.randn(16, 16, requires_grad=True)
    with torch.no_grad():
        fp8_linear(x, weight, None, RECIPES["delayed"], known=every.of("w"))
    every.end_step()
    assert not every.history_of("w").any()
    fp8_linear(x, weight, None, RECIPES["delayed"], known=every.of("w")).sum().backward()
    every.end_step()
    assert every.history_of("w")[:, 0].tolist() == [float(x.abs().max()), float(weight.detach().abs().max()), 1.0]


def test_elements_beyond_the_scale_become_the_largest_number() -> None:
    x, weight = torch.full((16, 16), 1000.0), torch.eye(16, requires_grad=True)
    y = fp8_linear(x, weight, None, RECIPES["delayed"], known=scales().of("w"))
    assert y.detach().max() == E4M3


def test_experts_have_scales_of_their_own_and_pieces_are_views() -> None:
    every = DelayedScales({"w": (3,), "experts": (8, 4)}, Fp8(recipe="delayed", history=2), CPU)
    own = every.of("experts").among(2, 2)
    for tensor in (0, 7):  # what flows in, and a gradient
        own.note(tensor, torch.tensor([0.0, 7.0]))
    every.end_step()
    assert own.scale(0).tolist() == pytest.approx([1.0, 7.0 / E4M3])
    assert own.scale(7).tolist() == pytest.approx([1.0, 7.0 / E5M2])
    assert every.of("experts").scale(0).tolist() == pytest.approx([1.0, 1.0, 1.0, 7.0 / E4M3])
    assert every.history_of("experts").shape == (8, 4, 2)
    assert not every.history_of("w").any()


@pytest.mark.parametrize("gated", [True, False])
def test_each_tensor_of_an_expert_has_a_scale_of_its_own(gated: bool) -> None:
    """Largest elements of the tensors of two experts, in their order: rows, the matrices, p, and gradients of what
    flows out of down and of the first matrices, in the dtypes of either."""
    activation = activation_of("relu2", gated=gated)
    shape = (EXPERT_TENSORS[len(activation.first) + 1], 2)
    every = DelayedScales({"experts": shape}, Fp8(recipe="delayed", history=1), CPU, wide=True)
    products = DelayedProducts(recipe=RECIPES["delayed"], scales=every.of("experts"), first=activation.first)
    generator = torch.Generator().manual_seed(0)
    rows, down, *first = (
        torch.rand(size, generator=generator, dtype=torch.float64).add_(0.5)
        for size in ((3, 16), (2, 16, 32), *((2, 32, 16) for _ in activation.first))
    )
    matrices, counts = Matrices(tuple(first), down), torch.tensor([1, 2])
    _, kept = run_experts(rows, torch.ones(3, dtype=torch.float64), counts, matrices, products, activation)
    products.see(kept, counts, matrices)
    gradient = torch.ones(3, 16, dtype=torch.float64)
    needed = [True] * (2 + len(first) + 1)
    differentiate_experts(gradient, kept, counts, matrices, needed, products, activation)
    every.end_step()

    def of(one: torch.Tensor) -> list[float]:
        return [float(one[:1].max()), float(one[1:].max())]  # of the rows of either expert

    found = every.history_of("experts")[..., 0].tolist()
    assert found[0] == of(rows)
    assert found[1 : len(first) + 2] == [matrix.amax(dim=(1, 2)).tolist() for matrix in (*first, down)]
    assert found[len(first) + 2 : len(first) + 4] == [of(kept.product), of(gradient)]
    assert len({tuple(one) for one in found}) == len(found) == 2 * len(first) + 4
    assert all(min(one) > 1 for one in found[len(first) + 4 :])
    low = len(first) + 3
    assert every.most.tolist() == [E4M3] * 2 * low + [E5M2] * 2 * (len(found) - low)


@pytest.mark.parametrize("length", [1, 2, 16, 17, 50])
def test_a_history_has_the_last_steps_the_newest_first(length: int) -> None:
    """Whatever the parts in which it moves on."""
    every, steps = scales(history=length), 60
    for step in range(1, steps + 1):
        every.of("w").see(GRADIENT, torch.tensor([float(step)]))
        every.end_step()
    assert every.history_of("w")[GRADIENT].tolist() == [float(step) for step in range(steps, steps - length, -1)]
    assert not every.history_of("v").any()
