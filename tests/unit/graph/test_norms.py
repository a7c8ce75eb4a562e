"""Norms that are spelled out are one operator, which computes the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from planner.graph.operator_graph import Argument, OperatorGraph, ValueRef
from planner.graph.rewriting.norms import LAYER_NORM, RMS_NORM
from planner.graph.torch_operators import resolve
from planner.graph.trace import trace

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
EPSILON, WIDTH = 1e-3, 8


def _rooted(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)


def _llama(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * _rooted(x.to(torch.float32)).to(x.dtype)


def _olmo2(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (weight * _rooted(x.to(torch.float32))).to(x.dtype)


def _gemma(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (_rooted(x.float()) * (1.0 + weight.float())).type_as(x)


def _gemma4(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + EPSILON, -0.5) * weight.float()).type_as(x)


def _t5(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(variance + EPSILON)).to(weight.dtype)


def _of_products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (torch.rsqrt((wide * wide).mean(dim=2, keepdim=True) + EPSILON) * wide).type_as(x) * weight


def _weightless(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _rooted(x.float()).type_as(x).sin() * weight


def _stays_wide(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _rooted(x.float()).sin() * weight


def _cohere(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.float32)
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    return (weight.to(torch.float32) * ((wide - mean) * torch.rsqrt(variance + EPSILON))).to(x.dtype)


def _over_tokens(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + EPSILON)).type_as(x) * weight


def _cubed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(3).mean(-1, keepdim=True) + EPSILON)).type_as(x) * weight


def _of_another(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide.sin() * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).type_as(x) * weight


def _of_half_the_mean(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    half = wide.mean(-1, keepdim=True) * 0.5
    return ((wide - half) * torch.rsqrt((wide - half).sub(half).pow(2).mean(-1, keepdim=True) + EPSILON)).type_as(x)


class _Model(nn.Module):
    def __init__(self, forward: Forward, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.way = nn.Parameter(torch.randn(WIDTH, dtype=dtype)), forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.way(x.tanh(), self.weight).float().sin() * self.weight.float()).sum() / x.shape[0]


def _computed(graph: OperatorGraph, values: dict[str, Any]) -> torch.Tensor:
    def value(argument: Argument) -> Any:
        if isinstance(argument, tuple):
            return [value(item) for item in argument]
        if isinstance(argument, ValueRef):
            return values[argument.name]
        return getattr(torch, argument.name) if hasattr(argument, "kind") else argument

    for op in graph.operators:
        values[op.results[0] or ""] = resolve(op.op)(*map(value, op.arguments), **{k: value(v) for k, v in op.keywords})
    found = values[graph.loss]
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("forward", "kind"),
    [
        *((way, RMS_NORM) for way in (_llama, _olmo2, _gemma, _gemma4, _t5, _of_products, _weightless, _stays_wide)),
        (_cohere, LAYER_NORM),
    ],
)
def test_a_norm_is_one_operator_that_computes_the_same(forward: Forward, kind: str, dtype: torch.dtype) -> None:
    model = _Model(forward, dtype)
    x = torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    graph = trace(model, (x,))
    (norm,) = (op for op in graph.operators if op.op in (RMS_NORM, LAYER_NORM))
    assert norm.op == kind
    assert norm.arguments[-1] == EPSILON
    assert not any(op.op.split(".")[1] in ("pow", "mean", "rsqrt", "mul_2") for op in graph.operators)
    results = []
    for loss in (lambda: model(x), lambda: _computed(graph, {graph.inputs[0]: x, "weight": model.weight})):
        model.zero_grad()
        made = loss()
        made.backward()
        assert model.weight.grad is not None
        results.append((made.detach(), model.weight.grad.clone()))
    torch.testing.assert_close(*results, rtol=1e-5 if dtype == torch.float32 else 3e-2, atol=1e-6)


@pytest.mark.parametrize("forward", [_over_tokens, _cubed, _of_another, _of_half_the_mean])
def test_what_is_no_norm_stays_as_it_is(forward: Forward) -> None:
    graph = trace(_Model(forward, torch.bfloat16), (torch.randn(3, 4, WIDTH, dtype=torch.bfloat16),))
    assert not any(op.op in (RMS_NORM, LAYER_NORM) for op in graph.operators)


def test_a_norm_in_16_bits_stays_as_it_is() -> None:
    """A kernel computes in fp32: another model."""
    graph = trace(_Model(lambda x, weight: weight * _rooted(x), torch.bfloat16), (torch.randn(3, 4, WIDTH).bfloat16(),))
    assert not any(op.op == RMS_NORM for op in graph.operators)


def test_what_else_reads_a_part_of_a_norm_still_has_it() -> None:
    """The cast of x stays for another, and a product that two read is the norm without its weight."""

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        made = _rooted(wide).type_as(x)
        return weight * made + made.cos() + wide.cos()

    graph = trace(_Model(forward, torch.bfloat16), (torch.randn(3, 4, WIDTH).bfloat16(),))
    (norm,) = (op for op in graph.operators if op.op == RMS_NORM)
    assert norm.arguments[2] is None
    assert sum(op.op == "aten.to.dtype" for op in graph.operators) == 3


def test_the_square_of_a_norm_has_no_weight() -> None:
    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        made = _rooted(x.float())
        return (made * made).type_as(x) * weight

    model, x = _Model(forward, torch.float32), torch.randn(3, 4, WIDTH)
    graph = trace(model, (x,))
    torch.testing.assert_close(_computed(graph, {graph.inputs[0]: x, "weight": model.weight}), model(x))


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16])
def test_a_norm_in_float64_is_none_in_float32(narrow: torch.dtype) -> None:
    """Squares of these elements are larger than anything in float32."""

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _rooted((x * 1e25).double()).type_as(x) * weight

    model, x = _Model(forward, narrow), torch.randn(3, 4, WIDTH).to(narrow)
    graph = trace(model, (x,))
    found, expected = _computed(graph, {graph.inputs[0]: x, "weight": model.weight}), model(x)
    torch.testing.assert_close(found, expected, rtol=1e-5 if narrow == torch.float32 else 3e-2, atol=1e-6)


def test_a_cast_between_two_narrow_dtypes_is_part_of_the_model() -> None:
    """What bfloat16 holds and float16 does not."""

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = (x * 1e6).float()
        return (((x * 1e6).half() * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).isinf().float()).type_as(
            x
        ) * weight

    model, x = _Model(forward, torch.bfloat16), torch.randn(3, 4, WIDTH).bfloat16()
    graph = trace(model, (x,))
    torch.testing.assert_close(_computed(graph, {graph.inputs[0]: x, "weight": model.weight}), model(x))
