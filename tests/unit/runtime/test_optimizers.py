"""What torch's optimizers are given to go on from a checkpoint."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from planner.errors import RequestError
from runtime.optimizers import narrow
from runtime.optimizers.muon import whole
from runtime.optimizers.optimizers import (
    Optimizer,
    OptimizerSettings,
    kept_of,
    make_optimizer,
    moments_of,
    start_moments,
)
from tests.refusals import refused

ELSEWHERE = torch.device("meta")


@pytest.mark.parametrize(
    "given",
    [{"learning_rate": "1e-3"}, pytest.param({"learning_rate": lambda number: 0.1}, id="{'learning_rate': function}"),
     {"weight_decay": -0.1}, {"epsilon": float("inf")}, {"betas": (0.9, 1.0)}, {"betas": 0.9}, {"momentum": None}],
    ids=str,
)  # fmt: skip
def test_settings_that_are_no_numbers_are_refused(given: dict[str, Any]) -> None:
    with refused(RequestError, "OptimizerSettings", *given):
        OptimizerSettings(**given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [True, None])
def test_updates_are_counted_where_they_are_read(fused: bool | None, dtype: torch.dtype) -> None:
    """One kernel reads their number on the device of the weights; a chain of kernels is told it by the host."""
    weights = [torch.zeros(shape, device=ELSEWHERE, dtype=dtype) for shape in ((3, 4), (5,))]
    settings = OptimizerSettings(fused=fused)
    optimizer = make_optimizer("adamw", weights, settings)
    start_moments(optimizer, weights, moments_of("adamw", settings), 7)
    steps = [kept["step"] for kept in kept_of(optimizer)]
    assert [step.device for step in steps] == [ELSEWHERE if fused else torch.device("cpu")] * 2
    assert all(step.dtype == torch.float32 for step in steps)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_parts_of_rows_are_updated_as_whole_weights_are(name: str) -> None:
    """The kernel that updates all weights at once looks at no strides."""
    whole, gradient = torch.randn(6, 8), torch.randn(6, 4)
    parts = [whole[:, :4], whole[:, 4:].clone()]
    apart = [part.clone() for part in parts]
    for weights, fused in ((parts, True), (apart, False)):
        optimizer = make_optimizer(name, weights, OptimizerSettings(fused=fused, learning_rate=0.1))
        for _ in range(2):
            for weight in weights:
                weight.grad = gradient.clone()
            optimizer.step()
    assert not parts[0].is_contiguous()
    for one, other in zip(parts, apart, strict=True):
        torch.testing.assert_close(one, other)


CHUNK = 24
"""Elements that are updated at a time: of several weights, or a part of one."""


def rounded(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.copy_(tensor.bfloat16())


def kept_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    return [kept[kind] for kept in kept_of(optimizer) for kind in sorted(kept) if kind != "step"]


@pytest.mark.parametrize(("masters", "moments"), [(False, "fp32"), (True, "bf16"), (False, "bf16")])
@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "muon"])
def test_updates_are_computed_in_float32_whatever_is_kept(
    name: str, masters: bool, moments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by an optimizer of float32, of which weights and moments are rounded after every step."""
    monkeypatch.setattr(narrow, "UPDATE_CHUNK", CHUNK)
    generator = torch.Generator().manual_seed(0)
    shapes, names = ((4, 8), (8, 8), (8,), (8,), ()), ("first", "second", "third", "fourth", "fifth")
    drawn = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    own, plain = [w.clone() if not masters else w.float() for w in drawn], [w.float() for w in drawn]
    for weight in own:
        weight.grad_dtype = torch.float32
    settings = OptimizerSettings(weight_decay=0.1, undecayed=frozenset({"third"}), learning_rate=0.1)
    matrices = [whole(place, drawn[place]) for place in (0, 1)] if name == "muon" else []
    one = make_optimizer(name, own, settings, names=names, together=matrices, moment_dtype=moments)
    other = make_optimizer(name, plain, settings, names=names, together=matrices)
    for _ in range(3):
        for weight, copy in zip(own, plain, strict=True):
            copy.grad = torch.randn(weight.shape, generator=generator)
            weight.grad = copy.grad.clone()
        one.step()
        other.step()
        rounded(() if masters else plain)
        rounded(kept_tensors(other) if moments == "bf16" else ())
    for weight, copy in zip((*own, *kept_tensors(one)), (*plain, *kept_tensors(other)), strict=True):
        assert torch.equal(weight.float(), copy)
    assert {kept.dtype for kept in kept_tensors(one)} == {torch.bfloat16 if moments == "bf16" else torch.float32}


def test_pure_bfloat16_is_that_of_torch() -> None:
    """Whose fused AdamW keeps weights and moments in bfloat16 and computes in float32."""
    torch.manual_seed(0)
    theirs = torch.randn(30, 7).bfloat16()
    ours = theirs.clone()
    ours.grad_dtype = torch.float32
    optimizer = make_optimizer("adamw", [ours], OptimizerSettings(), moment_dtype="bf16")
    plain = torch.optim.AdamW([theirs], fused=True)
    for _ in range(5):
        theirs.grad = torch.randn(30, 7).bfloat16()
        ours.grad = theirs.grad.float()
        optimizer.step()
        plain.step()
    assert torch.equal(ours, theirs)
    for kind in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(kept_of(optimizer)[0][kind], plain.state[theirs][kind])
