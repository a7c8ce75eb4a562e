"""Products of lines of 32: that the operands of the kernel of Blackwell are what it reads, and which device has it.

No such device is at hand. What the kernel does is done here in fp32 on what it is given, scales read where cuBLAS says
that they are; and torch checks shapes, strides and dtypes of its arguments on tensors of a device that only seems to
be there.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner.fp8_recipes import LINE, RECIPES
from runtime.ops.fp8 import fp8_linear as module
from runtime.ops.fp8 import lines_product, scaled_products
from runtime.ops.fp8.fp8_linear import fp8_linear

MXFP8 = RECIPES["mxfp8"]


def read(scales: torch.Tensor, rows: int, lines: int) -> torch.Tensor:
    """The scale of every row and line (cuBLAS, "1D Block Scaling Factors Layout")."""
    across = -(-lines // 4)
    flat = scales.float()
    found = torch.empty(rows, lines)
    for row in range(rows):
        for line in range(lines):
            tile = 512 * ((row // 128) * across + line // 4)
            found[row, line] = flat[tile + (row % 32) * 16 + (row % 128 // 32) * 4 + line % 4]
    return found


def kernel(
    rows_RK: torch.Tensor,
    others_KC: torch.Tensor,
    of_rows: torch.Tensor,
    of_others: torch.Tensor,
    *,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    assert of_rows.dtype == of_others.dtype == torch.float8_e8m0fnu
    assert rows_RK.is_contiguous()
    assert others_KC.t().is_contiguous()
    wide = []
    for values, scales in ((rows_RK, of_rows), (others_KC.t(), of_others)):
        lines = values.shape[1] // LINE
        assert scales.numel() == -(-values.shape[0] // 128) * 128 * -(-lines // 4) * 4
        each = read(scales, values.shape[0], lines).repeat_interleave(LINE, dim=1)
        wide.append(values.float() * each)
    return (wide[0] @ wide[1].t()).to(out_dtype)


@pytest.mark.parametrize(("samples", "tokens", "inputs", "outputs"), [(2, 64, 160, 144), (1, 160, 64, 32)])
def test_the_kernel_is_given_what_is_multiplied_without_it(
    samples: int, tokens: int, inputs: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = (torch.randn(samples, tokens, inputs) * torch.logspace(-6, 6, inputs)).requires_grad_()
        weight = torch.randn(outputs, inputs, requires_grad=True)
        y = fp8_linear(x, weight, None, MXFP8)
        y.backward(torch.randn_like(y) * torch.logspace(-3, 3, outputs))
        return [y.detach(), x.grad, weight.grad]

    emulated, calls = run(), []
    with monkeypatch.context() as patch:
        patch.setattr(
            module, "has_lines_product", lambda rows, others: calls.append(rows.shape) or rows.shape[1] % LINE == 0
        )
        patch.setattr(torch, "_scaled_mm", kernel)
        given = run()
    assert len(calls) == 3
    for one, other in zip(emulated, given, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


class Counting(TorchDispatchMode):
    """Kernels that are called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def products_of(
    recipe: str, capability: tuple[int, int], tokens: int = 64, inputs: int = 64, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Scaled products of a layer, forward and backward, on a CUDA device of a capability that is not there: torch
    checks them as CUDA's on tensors without elements (`device_hint` of its meta functions)."""
    with pytest.MonkeyPatch.context() as patch, Counting() as counting:
        for user in (scaled_products, lines_product):
            patch.setattr(user, "cuda_capability", lambda _: capability)
        x = torch.empty(2, tokens, inputs, device="meta", dtype=dtype, requires_grad=True)
        weight = torch.empty(48, inputs, device="meta", dtype=dtype, requires_grad=True)
        y = fp8_linear(x, weight, None, RECIPES[recipe])
        y.backward(torch.empty_like(y))
    assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)
    assert {one.dtype for one in (y, x.grad, weight.grad)} == {dtype}
    return counting.calls["aten._scaled_mm.default"]


@pytest.mark.parametrize(
    ("recipe", "capability", "products"),
    [
        ("mxfp8", (10, 0), 3),
        ("mxfp8", (9, 0), 0),
        ("tensorwise", (9, 0), 3),
        ("tensorwise", (8, 0), 0),
        ("rowwise", (9, 0), 3),
        ("rowwise_with_gw_hp", (9, 0), 2),
        ("blockwise", (9, 0), 1),  # that of weight gradients, of columns
    ],
)
def test_kernels_are_chosen_by_capability(recipe: str, capability: tuple[int, int], products: int) -> None:
    assert products_of(recipe, capability) == products


def test_parts_of_lines_are_padded_but_between_samples() -> None:
    assert products_of("mxfp8", (10, 0), tokens=48) == 2  # the weight gradient sums over lines of each sample
    assert products_of("mxfp8", (10, 0), inputs=80) == 3


def test_extents_that_are_no_words_are_padded() -> None:
    assert products_of("tensorwise", (9, 0), tokens=41, inputs=72) == 3
    assert products_of("rowwise", (9, 0), tokens=41, inputs=72) == 3


def test_results_in_fp32_have_no_kernel() -> None:
    assert products_of("rowwise", (9, 0), dtype=torch.float32) == 0
    assert products_of("mxfp8", (10, 0), dtype=torch.float32) == 0
