"""Products of experts in fp8 by kernels: that they are given what is multiplied in fp32 without them."""

from collections import Counter

import pytest
import torch

from planner.fp8_recipes import RECIPES
from planner.models.experts import fp8 as fp8_experts
from planner.models.experts.fp8 import Fp8Products, fp8_grouped_outer, fp8_grouped_product
from planner.models.experts.grouped import grouped_product
from runtime.ops.fp8 import blocks_product, fp8_groups, lines_product
from tests.unit.runtime import test_blocks_product as blocks
from tests.unit.runtime import test_lines_product as lines

COUNTS = torch.tensor([37, 0, 64, 3])


def made(recipe: str, inputs: int, outputs: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    products = Fp8Products(recipe=RECIPES[recipe])
    total = int(COUNTS.sum())
    rows = (torch.randn(total, inputs) * torch.logspace(-2, 2, total)[:, None]).to(dtype)
    gradients = (torch.randn(total, outputs) * torch.logspace(2, -2, outputs)).to(dtype)
    matrices = (torch.randn(len(COUNTS), inputs, outputs) * torch.tensor([1.0, 2.0, 8.0, 0.1])[:, None, None]).to(dtype)
    return [
        products.product(rows, matrices, COUNTS, "hidden", of="gate", back=False),
        products.product(gradients, matrices.transpose(1, 2), COUNTS, "width", of="gate", back=True),
        products.outer(gradients, rows, COUNTS, "width", of="gate"),
    ]


def with_kernels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fp8_experts, "fp8_grouped_product", fp8_groups.grouped_product)
    patch.setattr(fp8_experts, "fp8_grouped_outer", fp8_groups.grouped_outer)


def counting(patch: pytest.MonkeyPatch, name: str) -> Counter[str]:
    """How often a product of `fp8_groups` is called."""
    calls, original = Counter[str](), getattr(fp8_groups, name)

    def counted(*given: object) -> object:
        calls[name] += 1
        return original(*given)

    patch.setattr(fp8_groups, name, counted)
    return calls


@pytest.mark.cases(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(192, 64), (64, 48), (48, 320), (512, 256)])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_experts_by_kernels_are_those_in_fp32(
    recipe: str, inputs: int, outputs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated = made(recipe, inputs, outputs, dtype)
    with_kernels(monkeypatch)
    calls = counting(monkeypatch, "scaled_product")
    if recipe == "blockwise":
        patch_hopper(monkeypatch)
    if recipe == "mxfp8":
        patch_blackwell(monkeypatch)
    own = {"blockwise": "blocks_product", "mxfp8": "lines_product"}.get(recipe)
    by_own = counting(monkeypatch, own) if own else Counter[str]()
    found = made(recipe, inputs, outputs, dtype)
    bars = {"rtol": 2e-2, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for one, other in zip(found, emulated, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one / scale, other / scale, **bars)
    assert not found[2][1].any(), "the second expert has no rows"
    assert calls.total() + by_own.total() >= 3 * 2 + len(COUNTS), (
        "two products of three experts, and a gradient of each"
    )
    if own and (dtype == torch.bfloat16 or recipe == "mxfp8") and min(inputs, outputs) >= blocks.BLOCK:
        assert by_own.total() == 6


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_scales_of_all_experts_are_made_at_once(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise there are eight launches for each product of an expert, where four are priced: two casts, the product
    and a copy of its result."""
    with_kernels(monkeypatch)
    calls = counting(monkeypatch, "scale_of")
    made(recipe, 192, 64, torch.bfloat16)
    assert calls.total() == 3 * 2


def patch_hopper(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(blocks_product, "cuda_capability", lambda _: (9, 0))
    patch.setattr(blocks_product, "has_narrow_cast", lambda _: True)
    patch.setattr(blocks_product, "narrow_cast", blocks.rounding)
    patch.setattr(torch.nn.functional, "scaled_mm", blocks.kernel)
    patch.setattr(fp8_groups, "has_blocks_product", lambda *_: True)


def patch_blackwell(patch: pytest.MonkeyPatch) -> None:
    original = torch._scaled_mm

    def either(
        rows: torch.Tensor, others: torch.Tensor, first: torch.Tensor, second: torch.Tensor, **named: object
    ) -> object:
        kernel = lines.kernel if first.dtype == torch.float8_e8m0fnu else original
        return kernel(rows, others, first, second, **named)

    patch.setattr(fp8_groups, "has_lines_product", lambda *_: True)
    patch.setattr(torch, "_scaled_mm", either)
    assert lines_product.LINE == 32


def test_a_part_of_blocks_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that has 96 of 192: the second block is on both."""
    rows, matrices, counts = torch.randn(8, 96), torch.randn(1, 96, 256), torch.tensor([8])
    inside, outside = torch.arange(96, 192) // 128, torch.arange(256) // 128
    given = (
        rows,
        torch.full((8, 2), 4.0),
        matrices,
        torch.full((1, 2, 2), 5.0),
        inside,
        outside,
        counts,
        "float8_e4m3fn",
    )
    patch_hopper(monkeypatch)
    calls = counting(monkeypatch, "blocks_product")
    assert torch.equal(fp8_groups.grouped_product(*given), fp8_grouped_product(*given))
    assert not calls


def test_kernels_are_those_of_cuda() -> None:
    for op in (fp8_grouped_product, fp8_grouped_outer):
        assert op._backend_fns.keys() == {None, "cuda"}


def test_a_host_asks_for_counts_once_and_again_where_they_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, asked, original = torch.tensor([2, 0, 3]), list[int](), torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: asked.append(1) or original(self))
    rows, matrices = torch.randn(5, 4), torch.randn(3, 4, 6)
    first = grouped_product(rows, matrices, counts)
    assert torch.equal(grouped_product(rows, matrices, counts), first)
    assert len(asked) == 1
    counts[0], counts[1] = 1, 1
    torch.testing.assert_close(grouped_product(rows, matrices, counts)[1], rows[1] @ matrices[1])
    assert len(asked) == 2
