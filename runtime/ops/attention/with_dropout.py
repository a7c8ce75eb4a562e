"""Attention with dropout of probabilities: its scores are in memory, because the mask depends on their positions.

    q k^T ──scale, mask──> scores ──softmax──> probabilities ──drop──> dropped ──v──> result

The backward pass keeps the probabilities, the dropped ones, and the keep mask: 2 w + 1 bytes for each score of w bytes
(Korthikanti et al. 2022, section 4.1, count the same 5 bytes in 16 bits). Scaling and masking keep nothing.

    B batch, H heads, G heads of keys (R = H / G queries share one), Q queries, K keys, D and E head dims
"""

import math

import torch

from runtime.ops.randomness import drop


def attention_with_dropout(
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKE: torch.Tensor,
    keep_BHQK: torch.Tensor,
    dropout_p: float,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    first_query: int = 0,
) -> torch.Tensor:
    """`scaled_dot_product_attention` with dropout, where `keep_BHQK` says which probabilities are kept, (B, H, Q, E).

    `attn_mask` broadcasts to the scores: bool (True: attend) or added to them. Query i here is query `first_query` + i
    of the sequence, which a causal mask counts.
    """
    batch, heads, queries, width = query_BHQD.shape
    groups, keys = key_BGKD.shape[1], key_BGKD.shape[2]
    grouped = query_BHQD.reshape(batch, groups, heads // groups * queries, width)
    product = grouped @ key_BGKD.transpose(-2, -1)
    product *= 1.0 / math.sqrt(width) if scale is None else scale
    scores = product.view(batch, heads, queries, keys)
    del product  # else it lives beside masked scores
    if is_causal:
        last = torch.arange(first_query, first_query + queries, device=scores.device).unsqueeze(1)
        scores = scores + _bias(torch.arange(keys, device=scores.device) <= last, scores)
    if attn_mask is not None:
        scores = scores + (_bias(attn_mask, scores) if attn_mask.dtype == torch.bool else attn_mask)
    dropped = drop(torch.softmax(scores, dim=-1), keep_BHQK, dropout_p)
    made = dropped.view(batch, groups, heads // groups * queries, keys) @ value_BGKE
    return made.view(batch, heads, queries, value_BGKE.shape[-1])


def _bias(allowed: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Zero where allowed, minus infinity elsewhere: adding it saves nothing for the backward pass."""
    return scores.new_zeros(allowed.shape).masked_fill_(~allowed, -math.inf)
