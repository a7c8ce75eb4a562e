"""Scans of state-space models, and the convolution before them: what transformers' modules spell out, as one operator
each."""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers.models.jamba import modeling_jamba
from transformers.models.mamba.modeling_mamba import causal_conv1d_fn, mamba_selective_scan
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.minimax import modeling_minimax

from planner.graph.operators import recomputed, state_kernels
from planner.graph.operators.causal_convolution import causal_convolution
from planner.graph.operators.selective_scan import selective_scan
from planner.graph.operators.state_space_scan import state_space_scan
from planner.graph.tracing.scans import CAUSAL_CONVOLUTION, SELECTIVE_SCAN, STATE_SPACE, scans_as_operators


def drawn(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def agree(own: Callable[..., torch.Tensor], theirs: Callable[..., torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    """Results and the gradients of all operands."""
    found = []
    for function in (own, theirs):
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        made = function(*leaves)
        made.square().sum().backward()
        found.append([made.detach(), *(leaf.grad for leaf in leaves)])
    for one, other in zip(*found, strict=True):
        assert float((one - other).abs().max()) < 1e-5 * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("steps", [5, 21])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("limits", "softplus"), [((0.0, math.inf), True), ((0.1, 0.5), True), ((0.0, 2.0), False)])
def test_a_decay_for_each_head(steps: int, groups: int, limits: tuple[float, float], softplus: bool) -> None:
    """In whole chunks of 8 steps and not."""
    given = drawn((2, steps, 4, 3), (2, steps, 4), (4,), *2 * [(2, steps, groups, 5)], (4,), (4,))
    given[2] = -given[2].abs()
    bounds = limits[0], None if limits[1] == math.inf else limits[1]
    agree(
        lambda *tensors: state_space_scan(*tensors, softplus, *bounds, 8),
        lambda x, step, a, b, c, d, bias: modeling_mamba2.mamba2_chunk_scan(
            x, step, a, b, c, 8, D=d, dt_bias=bias, dt_softplus=softplus, dt_limit=limits
        ),
        given,
    )


@pytest.mark.parametrize("steps", [5, 70])
def test_a_decay_for_each_channel(steps: int) -> None:
    wide, read = (2, 6, steps), (2, 4, steps)
    given = drawn(wide, wide, (6, 4), read, read, (6,), wide, (6,))
    given[2] = -given[2].abs()
    agree(
        lambda *tensors: selective_scan(*tensors, True),
        lambda x, step, a, b, c, d, z, bias: mamba_selective_scan(
            x, step, a, b, c, D=d, z=z, delta_bias=bias, delta_softplus=True
        ),
        given,
    )


@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_causal_convolution(activation: str | None) -> None:
    agree(
        lambda *tensors: causal_convolution(*tensors, activation is not None),
        lambda *tensors: causal_conv1d_fn(*tensors, activation=activation),
        drawn((2, 6, 9), (6, 4), (6,)),
    )


def operators_of(layer: torch.nn.Module, x: torch.Tensor) -> list[str]:
    """What is called while a layer is traced, which computes what it does."""
    with torch.no_grad():
        plain = layer(x)
    with scans_as_operators(layer):
        exported = torch.export.export(layer, (x,), strict=False)
    torch.testing.assert_close(exported.module()(x), plain, rtol=1e-5, atol=1e-6)
    return [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]


def test_modules_of_transformers_call_them_while_they_are_traced() -> None:
    config = modeling_mamba2.Mamba2Config(
        hidden_size=16, num_heads=4, head_dim=8, state_size=4, n_groups=2, chunk_size=4, num_hidden_layers=1
    )
    before = modeling_mamba2.mamba2_chunk_scan
    found = operators_of(modeling_mamba2.Mamba2Mixer(config, 0), torch.randn(1, 6, 16))
    assert modeling_mamba2.mamba2_chunk_scan is before
    assert found.count(STATE_SPACE) == found.count(CAUSAL_CONVOLUTION) == 1
    assert len(found) < 45  # more than 120 where it is written out


def test_a_long_loop_over_steps_is_one_operator() -> None:
    """The scan of Jamba, of which an exported program has some operators for each step."""
    config = modeling_jamba.JambaConfig(hidden_size=8, mamba_d_state=4, mamba_dt_rank=2, num_hidden_layers=1)
    lengths = [operators_of(modeling_jamba.JambaMambaMixer(config, 0), torch.randn(1, s, 8)) for s in (4, 64)]
    assert [found.count(SELECTIVE_SCAN) for found in lengths] == [1, 1]
    assert len(lengths[0]) == len(lengths[1])


@pytest.mark.parametrize("masked", [False, True])
def test_lightning_attention_is_one_operator(masked: bool) -> None:
    """MiniMax's linear attention, a loop over blocks of tokens in its forward pass; the last block is not whole."""
    config = modeling_minimax.MiniMaxConfig(
        hidden_size=16, num_attention_heads=4, head_dim=4, num_hidden_layers=4, block_size=4,
        layer_types=["linear_attention"] * 4,
    )  # fmt: skip
    layer = modeling_minimax.MiniMaxLightningAttention(config, 1)
    mask = torch.arange(10).expand(2, 10) < torch.tensor([[10], [7]]) if masked else None
    found = []
    before = modeling_minimax.MiniMaxLightningAttention.forward
    for as_operators in (contextlib.nullcontext, lambda: scans_as_operators(layer)):
        x = torch.randn(2, 10, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        layer.zero_grad()
        with as_operators():
            made, _ = layer(x, (), mask)
        made.square().sum().backward()
        found.append([made.detach(), *(leaf.grad for leaf in (x, *layer.parameters()))])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert modeling_minimax.MiniMaxLightningAttention.forward is before
    lengths = []
    for steps in (4, 64):
        with scans_as_operators(layer):
            exported = torch.export.export(layer, (torch.randn(1, steps, 16), (), None), strict=False)
        lengths.append([str(node.target) for node in exported.graph.nodes if node.op == "call_function"])
    assert [calls.count(STATE_SPACE) for calls in lengths] == [1, 1]
    assert len(lengths[0]) == len(lengths[1])


def test_with_a_state_or_packed_it_stays_as_it_is() -> None:
    given = drawn((1, 4, 2, 3), (1, 4, 2), (2,), (1, 4, 1, 5), (1, 4, 1, 5))
    mixer = modeling_mamba2.Mamba2Mixer(modeling_mamba2.Mamba2Config(hidden_size=16, num_heads=4, head_dim=8), 0)
    with scans_as_operators(mixer):
        _, state = modeling_mamba2.mamba2_chunk_scan(*given, 4, return_final_states=True)
        assert state.shape == (1, 2, 3, 5)
        with pytest.raises(ValueError, match="packed sequences"):
            modeling_mamba2.mamba2_chunk_scan(*given, 4, seq_idx=torch.zeros(1, 4))


def test_kernels_are_called_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for that of mamba-ssm, which autograd differentiates."""
    calls: list[dict[str, Any]] = []

    def kernel(*given: Any, **settings: Any) -> torch.Tensor:
        calls.append(settings)
        return modeling_mamba2.mamba2_chunk_scan(*given, **settings)

    package = type("package", (), {"mamba_chunk_scan_combined": staticmethod(kernel)})
    monkeypatch.setattr(recomputed, "on_gpu", lambda _: True)
    monkeypatch.setattr(recomputed, "installed", lambda name: name == "mamba_ssm")
    monkeypatch.setitem(__import__("sys").modules, "mamba_ssm.ops.triton.ssd_combined", package)
    given = drawn((1, 6, 4, 3), (1, 6, 4), (4,), (1, 6, 2, 5), (1, 6, 2, 5), (4,), (4,))
    agree(
        lambda *tensors: state_space_scan(*tensors, True, 0.0, None, 4),
        lambda *tensors: state_space_scan.composed(*tensors, True, 0.0, None, 4),
        given,
    )
    assert len(calls) == 2
    assert all(settings["dt_limit"] == (0.0, math.inf) for settings in calls)
    assert not state_kernels.installed("no_such_package")


def test_a_function_that_somebody_put_there_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that passes for the function that it wraps."""
    config = modeling_mamba2.Mamba2Config(
        hidden_size=16, num_heads=4, head_dim=8, state_size=4, n_groups=2, chunk_size=4, num_hidden_layers=1
    )
    theirs = modeling_mamba2.mamba2_chunk_scan

    @functools.wraps(theirs)
    def mine(x: torch.Tensor, dt: torch.Tensor, decay: torch.Tensor, *given: Any, **settings: Any) -> Any:
        return theirs(x, dt, decay * 3.0, *given, **settings)

    monkeypatch.setattr(modeling_mamba2, "mamba2_chunk_scan", mine)
    found = operators_of(modeling_mamba2.Mamba2Mixer(config, 0), torch.randn(1, 6, 16))
    assert STATE_SPACE not in found
    assert found.count(CAUSAL_CONVOLUTION) == 1
