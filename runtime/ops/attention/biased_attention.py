"""Attention with a trained bias, as one operator on devices where PyTorch composes it of several.

    s = scale q k^T + bias,  p = softmax(s),  y = p v           over the keys, in float32 (float64 for float64)

    gradient of v = p^T g        of s = p (g v^T - sum(g y))     of q, k = scale times the latter with k, q; of the bias
                                                                 the sum over the dims in which it is broadcast

Composed, autograd keeps the scores. Fused, it keeps q, k, v, the bias, the result and one number for each query, and
recomputes the scores (Dao et al. 2022, arXiv 2205.14135, algorithm 4), as accelerator kernels do. So memory is the same
as the plan's prediction on all devices.

    B batch, H heads, Q queries, K keys, D and E head dims
"""

import math
from typing import Any

import torch


def biased_attention(
    query_BHQD: torch.Tensor,
    key_BHKD: torch.Tensor,
    value_BHKE: torch.Tensor,
    bias: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """`scaled_dot_product_attention` with `bias` added to the scores, to which it broadcasts, (B, H, Q, E)."""
    factor = 1.0 / math.sqrt(query_BHQD.shape[-1]) if scale is None else scale
    return _BiasedAttention.apply(query_BHQD, key_BHKD, value_BHKE, bias, factor)  # type: ignore[no-any-return, no-untyped-call]


class _BiasedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float
    ) -> torch.Tensor:
        made: tuple[torch.Tensor, torch.Tensor] = _forward(query, key, value, bias, scale)
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, bias, *made)
        return made[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found: list[torch.Tensor] = _backward(gradients[0], *ctx.saved_tensors, ctx.scale)
        return (*found, None)


@torch.library.custom_op("planner::biased_attention", mutates_args=())
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, (B, H, Q, E), with the heads of a query contiguous in memory as fused kernels write them, and the
    log-sum-exp of the scores, (B, H, Q)."""
    scores = _scores(query, key, bias, scale)
    logarithm = torch.logsumexp(scores, dim=-1)
    result = ((scores - logarithm.unsqueeze(-1)).exp() @ wide(value)).to(query.dtype)
    return result.transpose(1, 2).contiguous().transpose(1, 2), logarithm


@_forward.register_fake
def _forward_types(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, queries, _ = query.shape
    result = query.new_empty((batch, queries, heads, value.shape[-1])).transpose(1, 2)
    return result, query.new_empty(query.shape[:-1], dtype=wide_dtype(query))


@torch.library.custom_op("planner::biased_attention_backward", mutates_args=())
def _backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    result: torch.Tensor,
    logarithm: torch.Tensor,
    scale: float,
) -> list[torch.Tensor]:
    """Gradients of query, key, value and bias."""
    probabilities = (_scores(query, key, bias, scale) - logarithm.unsqueeze(-1)).exp()
    wider = wide(gradient)
    of_value = probabilities.transpose(-2, -1) @ wider
    inner = (wider * wide(result)).sum(dim=-1, keepdim=True)
    of_scores = probabilities * (wider @ wide(value).transpose(-2, -1) - inner)
    of_query = of_scores @ wide(key) * scale
    of_key = of_scores.transpose(-2, -1) @ wide(query) * scale
    return [
        of_query.to(query.dtype),
        of_key.to(key.dtype),
        of_value.to(value.dtype),
        of_scores.sum_to_size(bias.shape).to(bias.dtype).contiguous(),
    ]


@_backward.register_fake
def _backward_types(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    result: torch.Tensor,
    logarithm: torch.Tensor,
    scale: float,
) -> list[torch.Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in (query, key, value, bias)]


def _scores(query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor, scale: float) -> torch.Tensor:
    return wide(query) @ wide(key).transpose(-2, -1) * scale + wide(bias)


def wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """float32, or the dtype of the tensor where that is wider."""
    return torch.promote_types(tensor.dtype, torch.float32)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in its `wide_dtype`."""
    return tensor.to(wide_dtype(tensor))
