"""The leaf of a parameter whose gradient is cut finer than its weight."""

import gc
import weakref

import pytest
import torch

from tests.contract.one_rank import one_rank
from tests.distributed import plans


@pytest.mark.parametrize(("kind", "stubs"), [("zero1", False), ("zero2", True), ("zero3", False)])
def test_a_stub_has_the_shape_of_the_gradient_and_no_memory(kind: str, stubs: bool) -> None:
    plan = plans.hand_plan(kind, "llama", plans.mesh_of(4), recomputation="full")
    with one_rank("llama", plan, plans.traced("llama")) as (step, _):
        step.accumulate(*plans.batch())
        for name, parameter in step.rank.parameters.items():
            assert parameter.trainable
            assert (parameter.stub is not None) is stubs
            assert parameter.leaf.is_leaf
            assert parameter.leaf.grad is None, "it has been moved to the gradient"
            assert parameter.gradient is not None, name
            assert parameter.gradient.dtype == torch.float32
            assert parameter.gradient.shape == parameter.leaf.shape == parameter.local_gradient().shape
            if stubs:
                assert parameter.leaf.untyped_storage().nbytes() == 4
                assert parameter.piece.shape == parameter.shape
                assert not parameter.piece.requires_grad
                assert parameter.gradient.numel() * 4 == parameter.piece.numel()


def test_a_frozen_weight_has_no_stub_whatever_its_gradient_would_be() -> None:
    plan = plans.hand_plan("zero2", "mixture-frozen", plans.mesh_of(4))
    with one_rank("mixture-frozen", plan, plans.traced("mixture-frozen"), lowered=False) as (step, _):
        step.accumulate(*plans.batch())
        frozen = [parameter for parameter in step.rank.parameters.values() if not parameter.trainable]
        assert frozen
        assert all(parameter.stub is None and parameter.gradient is None for parameter in frozen)


def test_nothing_is_kept_of_a_step_that_is_gone() -> None:
    plan = plans.hand_plan("zero1", "llama", plans.mesh_of(4))
    with one_rank("llama", plan, plans.traced("llama")) as (step, _):
        step.accumulate(*plans.batch())
        pieces = [weakref.ref(parameter.piece) for parameter in step.rank.parameters.values()]
    del step, _
    gc.collect()
    assert not [piece for piece in pieces if piece() is not None]
