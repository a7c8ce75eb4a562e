"""Linear layers in fp8 on one device: what is computed, how exact that is, and that torch's products are ours."""

import math

import pytest
import torch
import torch.nn.functional as F

from planner.fp8_recipes import RECIPES, Recipe
from planner.models.experts.fp8 import in_powers
from runtime.ops.fp8 import scaled_products
from runtime.ops.fp8.fp8_linear import fp8_linear

NOW = [name for name, recipe in RECIPES.items() if not recipe.delayed]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOKENS, INPUTS, OUTPUTS = 48, 64, 32


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, TOKENS // 4, INPUTS) * torch.logspace(-3, 3, TOKENS).reshape(4, -1, 1)
    weight, bias = torch.randn(OUTPUTS, INPUTS), torch.randn(OUTPUTS)
    return tuple(value.to(dtype).requires_grad_() for value in (x, weight, bias))  # type: ignore[return-value]


def cast(values: torch.Tensor, dtype: torch.dtype, dim: int | None) -> torch.Tensor:
    """Rounded to eight bits and back, with a scale for all or for what stands along a dim."""
    largest = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    scale = largest / torch.finfo(dtype).max
    return (values / scale).to(dtype).to(values.dtype) * scale


def in_lines(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Rounded to e4m3 and back, with a power of two for each 32 elements along a dim."""
    found = []
    for piece in values.split(32, dim):
        scale = torch.exp2(torch.ceil(torch.log2(piece.abs().amax(dim, keepdim=True) / torch.finfo(E4M3).max)))
        found.append((piece / scale).to(E4M3).to(values.dtype) * scale)
    return torch.cat(found, dim)


@pytest.mark.parametrize("name", [name for name in NOW if name != "mxfp8"])
def test_results_and_gradients_are_those_of_rounded_operands(name: str) -> None:
    recipe, (x, weight, bias) = RECIPES[name], operands(torch.float64)
    y = fp8_linear(x, weight, bias, recipe)
    given = torch.randn_like(y)
    y.backward(given)
    rows, gradient = x.detach().reshape(-1, INPUTS), given.reshape(-1, OUTPUTS)
    w, low = weight.detach(), getattr(torch, recipe.gradients)
    by_row = recipe.scales != "tensor"  # of a layer this small a row of x is in one block, and the weight is one
    of_weight = (lambda dim: dim) if recipe.scales == "row" else (lambda dim: None)
    along = (lambda dim: dim) if by_row else (lambda dim: None)
    assert low == (E4M3 if by_row else E5M2)
    expected = cast(rows, E4M3, along(1)) @ cast(w, E4M3, of_weight(1)).t() + bias.detach()
    torch.testing.assert_close(y.detach().reshape(-1, OUTPUTS), expected)
    of_inputs = cast(gradient, low, along(1)) @ cast(w, E4M3, of_weight(0))
    torch.testing.assert_close(x.grad.reshape(-1, INPUTS), of_inputs)
    rounded = cast(gradient, low, along(0)).t() @ cast(rows, E4M3, along(0))
    torch.testing.assert_close(weight.grad, rounded if recipe.weight_gradients else gradient.t() @ rows)
    torch.testing.assert_close(bias.grad, gradient.sum(0))


def test_lines_of_32_have_powers_of_two() -> None:
    """Of both operands of each product along what it sums, of tokens in each sample by itself."""
    x, weight, _ = operands(torch.float64)
    y = fp8_linear(x, weight, None, RECIPES["mxfp8"])
    given = torch.randn_like(y)
    y.backward(given)
    rows, w = x.detach(), weight.detach()
    torch.testing.assert_close(y.detach(), in_lines(rows, -1) @ in_lines(w, 1).t())
    torch.testing.assert_close(x.grad, in_lines(given, -1) @ in_lines(w, 0))
    expected = in_lines(given, 1).flatten(0, 1).t() @ in_lines(rows, 1).flatten(0, 1)
    torch.testing.assert_close(weight.grad, expected)


@pytest.mark.parametrize("largest", [448.0, 448.0 * 2**-7, 449.0, 3e-9, 1e-44])
def test_scales_are_the_next_powers_of_two(largest: float) -> None:
    found = in_powers(torch.tensor([largest], dtype=torch.float64), E4M3) / 448.0
    assert float(found) == 2.0 ** max(math.ceil(math.log2(max(largest, 1e-12) / 448.0)), -127)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NOW)
def test_products_of_torch_are_those_in_fp32(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[torch.Tensor]:
        x, weight, bias = operands(dtype)
        y = fp8_linear(x, weight, bias, RECIPES[name])
        y.square().mean().backward()
        return [y.detach(), x.grad, weight.grad, bias.grad]

    by_torch = run()
    monkeypatch.setattr(scaled_products, "has_scaled_product", lambda *_, **__: False)
    for one, other in zip(by_torch, run(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "share"), [("tensorwise", 0.05), ("rowwise", 0.05)])
def test_three_bits_are_lost(name: str, share: float) -> None:
    x, weight, bias = operands()
    exact = F.linear(x, weight, bias)
    error = float(((fp8_linear(x, weight, bias, RECIPES[name]) - exact).norm() / exact.norm()).detach())
    assert 0.005 < error < share


def test_rows_of_their_own_scale_keep_small_tokens() -> None:
    x, weight, _ = operands()
    exact = F.linear(x, weight)[0, 0]

    def error(recipe: Recipe) -> float:
        return float(((fp8_linear(x, weight, None, recipe)[0, 0] - exact).norm() / exact.norm()).detach())

    assert error(RECIPES["rowwise"]) < 0.05 < error(RECIPES["tensorwise"])


def test_zeros_stay_zeros() -> None:
    _, weight, _ = operands()
    x = torch.zeros(16, INPUTS, requires_grad=True)
    y = fp8_linear(x, weight, None, RECIPES["rowwise"])
    y.sum().backward()
    assert not y.any()
    assert x.grad.isfinite().all()
    assert not weight.grad.any()
