"""Attention with features that PyTorch's own lacks: sinks, and capped scores.

A sink is a number of each head that joins the softmax of every query and has no value, so that the weights of the keys
may sum to less than 1 (gpt-oss: OpenAI 2025, arXiv 2508.10925; Xiao et al. 2023, arXiv 2309.17453). A cap c keeps
scores between -c and c (Gemma 2: Gemma Team 2024, arXiv 2408.00118, section 2).

    z = scale q k^T     z = c tanh(z / c)     l = log sum exp(z)     L = log(exp(l) + exp(s))     y = exp(z - L) v

    with the gradient g of y: that of z is exp(z - L) (g v^T - g . y), before the cap times 1 - tanh^2; a mask that
    is added to z has the same gradient; that of the sink is - sum over samples and queries of exp(s - L) (g . y)

It is one operator, `planner::composed_attention`, known to torch once this module is imported. If the mask is of a
known kind, it becomes `planner.masked_attention`, which makes no scores of queries x keys.

    B batch, H heads, G heads of keys (H / G queries share one), Q queries, K keys, D and E head dims
"""

import math
from typing import Any

import torch


@torch.library.custom_op("planner::composed_attention", mutates_args=())
def composed_attention(
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKE: torch.Tensor,
    sinks_H: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    """The result, B H Q E. A mask, boolean (True takes part) or added to the scores, broadcasts to them."""
    probabilities_BHQK = _probabilities(query_BHQD, key_BGKD, sinks_H, mask, causal, scale, cap)[0]
    return (probabilities_BHQK @ _shared(value_BGKE, query_BHQD)).to(query_BHQD.dtype)


@composed_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_others: Any) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    query, key, value, sinks, mask, ctx.causal, ctx.scale, ctx.cap = inputs
    ctx.save_for_backward(query, key, value, sinks, mask, output)


def _backward(ctx: Any, gradient_BHQE: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    query, key, value, sinks, mask, result = ctx.saved_tensors
    probabilities, slope = _probabilities(query, key, sinks, mask, ctx.causal, ctx.scale, ctx.cap)
    wide, dtype = gradient_BHQE.to(probabilities.dtype), probabilities.dtype
    inner = (wide * result.to(dtype)).sum(-1, keepdim=True)
    of_scores = probabilities * (wide @ _shared(value, query).transpose(-2, -1) - inner)
    factor = _scale(query, ctx.scale)
    of_mask = of_scores.sum_to_size(mask.shape).to(mask.dtype) if ctx.needs_input_grad[4] else None
    of_scores = of_scores if slope is None else of_scores * slope
    of_key = _summed(of_scores.transpose(-2, -1) @ query.to(dtype) * factor, key)
    of_value = _summed(probabilities.transpose(-2, -1) @ wide, value)
    of_query = (of_scores @ _shared(key, query) * factor).to(query.dtype)
    of_sinks = None
    if sinks is not None:
        of_sinks = -((1 - probabilities.sum(-1, keepdim=True)) * inner).sum(dim=(0, 2, 3)).to(sinks.dtype)
    return of_query, of_key, of_value, of_sinks, of_mask, None, None, None


composed_attention.register_autograd(_backward, setup_context=_keep)


def _probabilities(
    query: torch.Tensor,
    key: torch.Tensor,
    sinks: torch.Tensor | None,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight of each key for each query, B H Q K, in float32 at least: with a sink they sum to less than 1. And the
    slope of the cap at each score, where there is a cap."""
    shared = _shared(key, query)
    scores, slope = capped(query.to(shared.dtype) @ shared.transpose(-2, -1) * _scale(query, scale), cap)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is None:
        return torch.ops.aten._safe_softmax(scores, -1), slope  # 0 where a query sees nothing
    joined = torch.cat((scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    return joined.softmax(-1)[..., :-1], slope


def capped(scores: torch.Tensor, cap: float | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores between -cap and cap, and the derivative of the cap."""
    if cap is None:
        return scores, None
    bent = torch.tanh(scores / cap)
    return bent * cap, 1 - bent * bent


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def _shared(tensor_BGKD: torch.Tensor, query_BHQD: torch.Tensor) -> torch.Tensor:
    """Keys or values once for each head of queries that shares them, in float32 at least."""
    wide = tensor_BGKD.to(torch.promote_types(tensor_BGKD.dtype, torch.float32))
    return wide.repeat_interleave(query_BHQD.shape[1] // tensor_BGKD.shape[1], dim=1)


def _summed(gradient_BHKD: torch.Tensor, tensor_BGKD: torch.Tensor) -> torch.Tensor:
    """The gradient of keys or values from that of each head of queries."""
    batch, heads, *rest = gradient_BHKD.shape
    groups = tensor_BGKD.shape[1]
    return gradient_BHKD.reshape(batch, groups, heads // groups, *rest).sum(dim=2).to(tensor_BGKD.dtype)
