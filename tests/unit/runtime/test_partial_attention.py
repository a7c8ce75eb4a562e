"""Attention in pieces of the keys is attention to all of them, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from runtime import partial_attention
from runtime.partial_attention import attend, attend_backward, combined

SHAPES = [(4, 4, 16, 16), (4, 2, 16, 16), (4, 1, 16, 16), (4, 4, 24, 16), (4, 2, 16, 24)]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(("heads", "groups", "size", "value_size"), SHAPES)
def test_a_slice_attends_to_what_is_before_it_and_to_itself(
    heads: int, groups: int, size: int, value_size: int, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries 8 to 15 of 16: keys 0 to 7 whole, keys 8 to 15 up to each."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, heads, 16, size, dtype=torch.float64, generator=generator, requires_grad=True)
    key = torch.randn(2, groups, 16, size, dtype=torch.float64, generator=generator, requires_grad=True)
    value = torch.randn(2, groups, 16, value_size, dtype=torch.float64, generator=generator, requires_grad=True)
    gradient = torch.randn(2, heads, 8, value_size, dtype=torch.float64, generator=generator)
    whole = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    wanted = torch.autograd.grad(whole[:, :, 8:], (query, key, value), gradient)
    if plain:
        monkeypatch.setattr(partial_attention, "_on_cpu", lambda tensor: False)
    late = query.detach()[:, :, 8:]
    pieces = [(key.detach()[:, :, at : at + 8], value.detach()[:, :, at : at + 8], at == 8) for at in (0, 8)]
    before, own = (attend(late, k, v, causal=causal, scale=None) for k, v, causal in pieces)
    both = combined(before, own)
    torch.testing.assert_close(both.result, whole.detach()[:, :, 8:], rtol=1e-6, atol=1e-6)
    found = [attend_backward(gradient, late, k, v, both, causal=causal, scale=None) for k, v, causal in pieces]
    torch.testing.assert_close(found[0][0] + found[1][0], wanted[0][:, :, 8:], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat([found[0][1], found[1][1]], 2), wanted[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat([found[0][2], found[1][2]], 2), wanted[2], rtol=1e-5, atol=1e-6)
