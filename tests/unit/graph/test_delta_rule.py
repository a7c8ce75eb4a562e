"""The gated delta rule: what transformers' modules spell out, as one operator, and nothing else of a module changes."""

import sys
from typing import Any

import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from planner.graph.operators import recomputed
from planner.graph.operators.delta_rule import gated_delta_rule
from planner.graph.tracing.scans import scans_as_operators


def drawn(steps: int, key_heads: int, channels: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(steps)
    heads, width, wide = 4, 8, 6
    shapes = [(key_heads, width), (key_heads, width), (heads, wide), (heads, width) if channels else (heads,), (heads,)]
    tensors = [torch.randn(2, steps, *shape, generator=generator) for shape in shapes]
    return [*tensors[:3], -tensors[3].abs(), tensors[4].sigmoid()]


@pytest.mark.parametrize("steps", [5, 64, 150])
@pytest.mark.parametrize(("key_heads", "channels"), [(2, False), (4, True)])
def test_it_is_that_of_transformers(steps: int, key_heads: int, channels: bool) -> None:
    """Forward and backward, in whole chunks and not."""
    theirs = chunk_kimi_delta_attention if channels else torch_chunk_gated_delta_rule
    found = []
    for own in (True, False):
        leaves = [tensor.clone().requires_grad_() for tensor in drawn(steps, key_heads, channels)]
        if own:
            made = gated_delta_rule(*leaves, True)
        else:
            query, key, value, decay, beta = leaves
            made, _ = theirs(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)
        made.square().sum().backward()
        found.append([made.detach(), *(leaf.grad for leaf in leaves)])
    for one, other in zip(*found, strict=True):
        assert float((one - other).abs().max()) < 1e-5 * max(1.0, float(other.abs().max()))


def test_modules_of_transformers_call_it_while_they_are_traced() -> None:
    config = modeling_qwen3_next.Qwen3NextConfig(
        hidden_size=16, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=4, linear_value_head_dim=4
    )
    layer = modeling_qwen3_next.Qwen3NextGatedDeltaNet(config, 0)
    before = modeling_qwen3_next.torch_chunk_gated_delta_rule
    x = torch.randn(1, 6, 16)
    plain = layer(x)
    with scans_as_operators(layer):
        exported = torch.export.export(layer, (x,), strict=False)
    assert modeling_qwen3_next.torch_chunk_gated_delta_rule is before
    assert [str(node.target) for node in exported.graph.nodes].count("planner.gated_delta_rule.default") == 1
    torch.testing.assert_close(exported.module()(x), plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("key_heads", "channels"), [(2, False), (4, True)])
def test_kernels_are_called_where_they_are_installed(
    key_heads: int, channels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins for those of flash-linear-attention, which autograd differentiates: forward, and again backward."""
    shapes: list[torch.Size] = []

    def kernel(*given: torch.Tensor, use_qk_l2norm_in_kernel: bool) -> tuple[torch.Tensor, None]:
        shapes.append(given[1].shape)
        return gated_delta_rule.composed(*given, use_qk_l2norm_in_kernel), None

    package, name = ("fla.ops.kda", "chunk_kda") if channels else ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    monkeypatch.setattr(recomputed, "on_gpu", lambda _: True)
    monkeypatch.setattr(recomputed, "installed", lambda name: name == "fla")
    monkeypatch.setitem(sys.modules, package, type("package", (), {name: staticmethod(kernel)}))
    found: list[Any] = []
    for rule in (gated_delta_rule, gated_delta_rule.composed):
        leaves = [tensor.requires_grad_() for tensor in drawn(70, key_heads, channels)]
        made = rule(*leaves, True)
        made.square().sum().backward()
        found.append([made.detach(), *(leaf.grad for leaf in leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert shapes == 2 * [torch.Size((2, 70, 4, 8))]
