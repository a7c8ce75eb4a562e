"""Norms that are multiplied with a gate are one operator, which computes the same."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from planner.graph.operators import recomputed
from planner.graph.rewriting.gated_norm import gated_rms_norm
from planner.graph.rewriting.norms import GATED_NORM
from planner.graph.trace import trace

EPSILON, WIDTH = 1e-3, 8


class Model(nn.Module):
    """`made` of x and a gate, each a product, and the loss of what it makes."""

    def __init__(self, norm: nn.Module, made: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.made, self.both = norm, made, nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.made(self.norm, *self.both(x).chunk(2, dim=-1)).sum()


def operators(norm: type[nn.Module], made: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[str]:
    model = Model(norm(WIDTH, eps=EPSILON), made).to(dtype)
    return [op.op for op in trace(model, (torch.randn(2, 3, WIDTH, dtype=dtype),)).operators]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [Qwen3NextRMSNormGated, KimiLinearRMSNormGated])
def test_modules_of_transformers_have_it(norm: type[nn.Module], dtype: torch.dtype) -> None:
    found = operators(norm, lambda one, x, gate: one(x, gate), dtype)
    assert found.count(GATED_NORM) == 1
    assert not {"aten.mul.Tensor", "aten.silu.default", "aten.sigmoid.default", "aten.rms_norm.default"} & {*found}


@pytest.mark.parametrize(
    "made",
    [
        lambda norm, x, gate: norm(x, gate) + nn.functional.rms_norm(x, (WIDTH,)) * gate,
        lambda norm, x, gate: (
            (opened := nn.functional.silu(gate)) * nn.functional.rms_norm(x, (WIDTH,), eps=1.0) + opened
        ),
        lambda norm, x, gate: nn.functional.silu(gate) * nn.functional.rms_norm(x, (WIDTH,)),
    ],
)
def test_what_others_read_stays(made: Callable[..., torch.Tensor]) -> None:
    """A gate that is no activation, one that is read again, and a norm whose epsilon is left to its dtype."""
    assert "aten.rms_norm.default" in operators(Qwen3NextRMSNormGated, made, torch.float32)


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("norm", [Qwen3NextRMSNormGated, KimiLinearRMSNormGated])
def test_it_is_that_of_transformers(norm: type[nn.Module], installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, composed, and by a stand-in for the kernel of flash-linear-attention."""
    theirs, silu = norm(WIDTH, eps=EPSILON), norm is Qwen3NextRMSNormGated
    calls: list[dict[str, Any]] = []

    def kernel(x: torch.Tensor, g: torch.Tensor, weight: Any, bias: None, **settings: Any) -> torch.Tensor:
        calls.append(settings)
        return theirs(x, g) * weight

    package = type("package", (), {"rms_norm_gated": staticmethod(kernel)})
    monkeypatch.setattr(recomputed, "on_gpu", lambda _: installed)
    monkeypatch.setattr(recomputed, "installed", lambda name: name == "fla")
    monkeypatch.setitem(sys.modules, "fla.modules.fused_norm_gate", package)
    found = []
    for own in (True, False):
        drawn = torch.Generator().manual_seed(0)
        x, gate = (torch.randn(2, 3, WIDTH, generator=drawn).requires_grad_() for _ in range(2))
        made = gated_rms_norm(x, gate, torch.ones(WIDTH), EPSILON, silu) if own else theirs(x, gate)
        made.square().sum().backward()
        found.append((made, x.grad, gate.grad))
    torch.testing.assert_close(*found)
    assert calls == installed * 2 * [{"activation": "silu" if silu else "sigmoid", "eps": EPSILON}]
