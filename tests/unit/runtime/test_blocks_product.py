"""Scales of blocks of 128 as the kernel of Hopper reads them, and what decides on kernels."""

import pytest
import torch

from planner.fp8_recipes import BLOCK, RECIPES
from runtime.ops.fp8 import blocks_product as module
from runtime.ops.fp8 import fp8_linear as layers
from runtime.ops.fp8.blocks_product import blocks_product, has_blocks_product, in_fours, of_blocks
from runtime.ops.fp8.fp8_linear import fp8_linear
from runtime.ops.fp8.narrow_casts import has_narrow_cast
from runtime.ops.fp8.narrow_weights import in_8_bits

LOW = torch.float8_e4m3fn
BLOCKWISE = RECIPES["blockwise"]


def rounding(
    values_RK: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, block: tuple[int, int] = (1, 1)
) -> torch.Tensor:
    """What the Triton kernel does."""
    for dim, step in enumerate(block):
        scale = scale.repeat_interleave(step, dim=dim) if scale.shape[dim] > 1 else scale
    own = tuple(slice(extent if many > 1 else 1) for extent, many in zip(values_RK.shape, scale.shape, strict=True))
    return in_8_bits(values_RK, scale[own], dtype).contiguous()


def kernel(
    rows_TI: torch.Tensor,
    weight_IO: torch.Tensor,
    of_rows: torch.Tensor,
    first: object,
    of_weight: torch.Tensor,
    second: object,
    *,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """What cuBLAS does with operands and scales where it says that they stand ("1D and 2D Block Scaling for FP8")."""
    kinds = torch.nn.functional.ScalingType
    assert (first, second) == (kinds.BlockWise1x128, kinds.BlockWise128x128)
    assert rows_TI.is_contiguous()
    assert weight_IO.t().is_contiguous()
    (rows, inputs), outputs = rows_TI.shape, weight_IO.shape[1]
    assert rows % 16 == inputs % BLOCK == outputs % BLOCK == 0
    blocks = inputs // BLOCK
    assert (of_rows.shape, of_rows.stride()) == ((rows, blocks), (1, rows))
    fours = -(-blocks // 4) * 4
    assert (of_weight.shape, of_weight.stride()) == ((fours, outputs // BLOCK), (1, fours))
    wide = rows_TI.float() * of_rows.repeat_interleave(BLOCK, 1)
    own = of_weight[:blocks].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (wide @ (weight_IO.float() * own)).to(output_dtype)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """A device that has the kernel: the shapes of the rows that it is given."""
    given: list[tuple[int, ...]] = []

    def counted(rows: torch.Tensor, *others: object, **named: torch.dtype) -> torch.Tensor:
        given.append(tuple(rows.shape))
        return kernel(rows, *others, **named)

    monkeypatch.setattr(module, "cuda_capability", lambda _: (9, 0))
    monkeypatch.setattr(module, "has_narrow_cast", lambda _: True)
    monkeypatch.setattr(module, "narrow_cast", rounding)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", counted)
    return given


@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"), [(48, 384, 256), (37, 640, 128), (20, 272, 400), (16, 512, 1024)]
)
def test_the_kernel_is_given_what_is_multiplied_without_it(
    tokens: int, inputs: int, outputs: int, hopper: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = (torch.randn(1, tokens, inputs) * torch.logspace(-3, 3, inputs)).bfloat16().requires_grad_()
        weight = torch.randn(outputs, inputs).bfloat16().requires_grad_()
        y = fp8_linear(x, weight, None, BLOCKWISE)
        y.backward((torch.randn(y.shape) * torch.logspace(-2, 2, outputs)).bfloat16())
        return [y.detach(), x.grad, weight.grad]

    found = run()
    words, blocks = (-(-tokens // 16) * 16, lambda extent: -(-extent // BLOCK) * BLOCK)
    assert hopper == [(words, blocks(inputs)), (words, blocks(outputs))]
    monkeypatch.setattr(layers, "has_blocks_product", lambda *_: False)
    for one, other in zip(found, run(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4 * float(other.abs().max()))


def test_a_weight_that_comes_in_8_bits_is_multiplied_as_it_is(hopper: list[tuple[int, ...]]) -> None:
    rows, weight = torch.randn(32, 256).bfloat16(), torch.randn(128, 256).bfloat16()
    most, of_weight = rows.abs().view(32, 2, BLOCK).amax(2).float(), torch.tensor([[7.0, 5.0]])
    scales = (of_weight / torch.finfo(LOW).max).repeat_interleave(BLOCK, 1)
    bits = in_8_bits(weight, scales, LOW)
    made = blocks_product(rows, most, weight, of_weight, LOW)
    assert torch.equal(blocks_product(rows, most, bits, of_weight, LOW), made)
    turned = blocks_product(torch.ones(16, 128).bfloat16(), torch.ones(16, 1), bits.t(), of_weight.t(), LOW)
    torch.testing.assert_close(turned[0].float(), (bits.float() * scales).sum(0), rtol=1e-2, atol=1e-2)
    assert hopper == [(32, 256)] * 2 + [(16, 128)]


def test_scales_of_rows_lie_block_after_block() -> None:
    scales = torch.rand(5, 3)
    read = of_blocks(scales, 16)
    assert read.stride() == (1, 16)
    assert torch.equal(read[:5], scales)
    assert read[5:].eq(1).all()


def test_scales_of_a_weight_are_padded_to_fours() -> None:
    scales = torch.rand(2, 5)
    read = in_fours(scales)
    assert (read.shape, read.stride()) == ((8, 2), (1, 8))
    assert torch.equal(read[:5].t(), scales)
    assert not read[5:].any()


def test_scales_of_a_turned_weight_that_need_no_zeros_are_read_alike() -> None:
    turned = torch.rand(8, 3).t()
    read = in_fours(turned)
    assert (read.shape, read.stride()) == ((8, 3), (1, 8))
    assert torch.equal(read.t(), turned)


def test_cpus_multiply_and_round_with_operators_of_torch() -> None:
    rows, weight = torch.zeros(16, 128).bfloat16(), torch.zeros(128, 128).bfloat16()
    assert not has_blocks_product(rows, weight)
    assert not has_narrow_cast(rows)
