"""Attention with its scores in memory: PyTorch's own where nothing is dropped, and no more kept than its rule says."""

import math

import pytest
import torch
import torch.nn.functional as F

from runtime.ops.attention.with_dropout import attention_with_dropout
from runtime.ops.randomness import Region, keep_mask


def operands(groups: int) -> list[torch.Tensor]:
    """Query, key and value of 4 heads, strided as after a transpose."""
    torch.manual_seed(0)
    return [
        torch.randn(2, 6, heads, 8, dtype=torch.float64).transpose(1, 2).requires_grad_()
        for heads in (4, groups, groups)
    ]


@pytest.mark.parametrize("mask", ["none", "bool", "added"])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_without_dropping_it_is_torchs(groups: int, scale: float | None, mask: str) -> None:
    query, key, value = operands(groups)
    allowed = torch.rand(2, 1, 6, 6) > 0.3
    allowed[..., 0] = True
    given = {"none": None, "bool": allowed, "added": torch.randn(4, 6, 6, dtype=torch.float64)}[mask]
    causal = given is None
    keep = torch.ones(2, 4, 6, 6, dtype=torch.bool)
    found = attention_with_dropout(query, key, value, keep, 0.0, attn_mask=given, is_causal=causal, scale=scale)
    wanted = F.scaled_dot_product_attention(
        query, key, value, attn_mask=given, is_causal=causal, scale=scale, enable_gqa=groups < 4
    )
    torch.testing.assert_close(found, wanted)
    gradient = torch.randn_like(found)
    for mine, torchs in zip(
        torch.autograd.grad(found, (query, key, value), gradient),
        torch.autograd.grad(wanted, (query, key, value), gradient),
        strict=True,
    ):
        torch.testing.assert_close(mine, torchs)


def test_dropped_probabilities_are_zero_and_the_others_scaled() -> None:
    query, key, _ = operands(4)
    keep = keep_mask(1, Region(start=(0, 0, 0, 0), shape=(2, 4, 6, 6)), 0.5, torch.device("cpu"))
    unit = torch.eye(6, dtype=torch.float64).expand(2, 4, 6, 6)
    probabilities = torch.softmax(query @ key.transpose(-2, -1) / math.sqrt(8), -1)
    found = attention_with_dropout(query, key, unit, keep, 0.5)
    torch.testing.assert_close(found, probabilities * keep * 2)


def test_later_queries_see_more_keys() -> None:
    query, key, value = operands(4)
    keep = torch.ones(2, 4, 6, 6, dtype=torch.bool)
    whole = attention_with_dropout(query, key, value, keep, 0.0, is_causal=True)
    part = attention_with_dropout(query[:, :, 2:], key, value, keep[:, :, 2:], 0.0, is_causal=True, first_query=2)
    torch.testing.assert_close(part, whole[:, :, 2:])


def test_what_is_kept_of_the_scores() -> None:
    """Probabilities, dropped probabilities and the mask; the operands as often as there are."""
    query, key, value = (tensor.float().detach().contiguous().requires_grad_() for tensor in operands(2))
    keep = torch.ones(2, 4, 6, 6, dtype=torch.bool)
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = attention_with_dropout(query, key, value, keep, 0.1, is_causal=True)
    held = {tensor.untyped_storage().data_ptr() for tensor in (query, key, value)}
    assert made.requires_grad
    scores = 2 * 4 * 6 * 6
    copies = sum(tensor.nbytes for tensor in (key, value))  # where a product cannot take a view
    extra = sum(nbytes for pointer, nbytes in saved.items() if pointer not in held)
    assert (2 * 4 + 1) * scores <= extra <= (2 * 4 + 1) * scores + copies
