"""Muon beside torch's, on matrices of every shape, several in one weight, narrow weights, and beside AdamW."""

import pytest
import torch

from runtime.optimizers.muon import Together, orthogonal, whole
from runtime.optimizers.optimizers import OptimizerSettings, kept_of, make_optimizer, start_moments

SHAPES = [(64, 32), (32, 64), (48, 48)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_that_of_torch_for_weights_in_bfloat16(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    narrow = torch.randn(shape, dtype=torch.bfloat16)
    master, theirs = narrow.float(), torch.nn.Parameter(narrow.float())
    ours = make_optimizer("muon", [master], OptimizerSettings(), together=[whole(0, narrow)])
    other = torch.optim.Muon([theirs], lr=1e-3, weight_decay=1e-2, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        gradient = torch.randn(shape)
        master.grad, theirs.grad = gradient.clone(), gradient.clone()
        ours.step()
        other.step()
    assert torch.equal(master, theirs)
    assert not torch.equal(master, narrow.float())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_values_come_close_to_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(3, *shape)))
    assert values.min() > 0.6
    assert values.max() < 1.2


def test_matrices_of_one_weight_are_independent() -> None:
    torch.manual_seed(0)
    experts = torch.randn(4, 16, 24)
    assert torch.equal(orthogonal(experts.clone())[2], orthogonal(experts[2:3].clone())[0])


def test_a_weight_without_a_gradient_goes_along_in_its_stack() -> None:
    """Two weights in one group, of which the stack is whole on this device anyway; one has no gradient, a third place
    no weight."""
    torch.manual_seed(0)
    weights, alone = [torch.randn(8, 8) for _ in range(2)], torch.randn(8, 8)
    alone.copy_(weights[0])
    before = weights[1].clone()
    group = Together(places=(0, 1), shapes=((8, 8), (8, 8)), dtype=torch.float32, size=3)
    both = make_optimizer("muon", weights, OptimizerSettings(), together=[group])
    one = make_optimizer("muon", [alone], OptimizerSettings(), together=[whole(0, alone)])
    gradient = torch.randn(8, 8)
    weights[0].grad, alone.grad = gradient.clone(), gradient.clone()
    both.step()
    one.step()
    torch.testing.assert_close(weights[0], alone)
    assert torch.equal(weights[1], before)


def test_others_are_updated_by_adamw_and_states_keep_the_order_of_weights() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(6), torch.randn(4, 6), torch.randn(5, 6)]
    like = [torch.nn.Parameter(weights[place].clone()) for place in (0, 2)]
    settings = OptimizerSettings(undecayed=frozenset({"norm"}))
    optimizer = make_optimizer(
        "muon", weights, settings, names=["norm", "proj", "embed"], together=[whole(1, weights[1])]
    )
    groups = [{"params": [like[0]], "weight_decay": 0.0}, {"params": [like[1]]}]
    plain = torch.optim.AdamW(groups, lr=1e-3)
    for _ in range(3):
        gradients = [torch.randn_like(weight) for weight in weights]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        for weight, place in zip(like, (0, 2), strict=True):
            weight.grad = gradients[place]
        optimizer.step()
        plain.step()
    torch.testing.assert_close(weights[0], like[0].detach())
    torch.testing.assert_close(weights[2], like[1].detach())
    kinds = [sorted(set(kept) - {"step"}) for kept in kept_of(optimizer)]
    adamw = ["exp_avg", "exp_avg_sq"]
    assert kinds == [adamw, ["momentum_buffer"], adamw]
    assert [kept[own[0]].shape for kept, own in zip(kept_of(optimizer), kinds, strict=True)] == [
        weight.shape for weight in weights
    ]


def test_a_state_begins_anew_with_memory_of_its_kind() -> None:
    weights = [torch.randn(4, 6), torch.randn(6)]
    optimizer = make_optimizer("muon", weights, OptimizerSettings(), together=[whole(0, weights[0])])
    start_moments(optimizer, weights, [("momentum_buffer",), ("exp_avg", "exp_avg_sq")], 7)
    matrix, vector = kept_of(optimizer)
    assert matrix.keys() == {"momentum_buffer"}
    assert float(vector["step"]) == 7


def test_a_narrow_weight_without_a_master_is_updated_in_float32() -> None:
    torch.manual_seed(0)
    narrow = torch.randn(16, 16, dtype=torch.bfloat16)
    wide, gradient = narrow.float(), torch.randn(16, 16)
    narrow.grad_dtype = torch.float32
    settings = OptimizerSettings(learning_rate=0.1)
    optimizers = [make_optimizer("muon", [own], settings, together=[whole(0, narrow)]) for own in (narrow, wide)]
    narrow.grad, wide.grad = gradient.clone(), gradient.clone()
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(narrow, wide.bfloat16())
    assert next(iter(kept_of(optimizers[0])))["momentum_buffer"].dtype == torch.float32
