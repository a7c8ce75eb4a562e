"""Linear layers in fp8 on one device: what is computed, how exact that is, and that torch's products are ours."""

import pytest
import torch
import torch.nn.functional as F

from planner.fp8_recipes import RECIPES, Recipe
from runtime.ops import fp8_linear as module
from runtime.ops.fp8_linear import fp8_linear

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


@pytest.mark.parametrize("name", RECIPES)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_products_of_torch_are_those_in_fp32(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[torch.Tensor]:
        x, weight, bias = operands(dtype)
        y = fp8_linear(x, weight, bias, RECIPES[name])
        y.square().mean().backward()
        return [y.detach(), x.grad, weight.grad, bias.grad]

    by_torch = run()
    monkeypatch.setattr(module, "_has_products", lambda *_, **__: False)
    for one, other in zip(by_torch, run(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


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
