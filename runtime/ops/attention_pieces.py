"""Attention to a piece of the keys, as one kernel that says how much of the softmax the piece makes up.

    y_i = softmax(scale q k_i^T) v_i      l_i = log sum exp(scale q k_i^T)         of piece i, forward
    l = log sum_i exp(l_i)                y = sum_i exp(l_i - l) y_i               of all pieces together
    gradients from q, k_i, v_i, y, l and the gradient of y alone                   of piece i, backward

(Dao et al. 2022, arXiv 2205.14135, section 3.1 and algorithm 4.) PyTorch's fused kernels return l and take it back.
Those of CPUs want values as wide as keys; those of accelerators 16 bits and a head dim that is a multiple of 8, too.
For everything else the scores are made, in float32 at least.

    B batch, H heads, G heads of keys (H / G queries share one), Q queries, K keys, D and E head dims
"""

import math
from typing import Any

import torch

from runtime.ops.biased_attention import wide, wide_dtype

_ATEN = torch.ops.aten
_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_DIMS = 8  # a head dim is a multiple of it
_WIDEST = 256


def scale_of(query_BHQD: torch.Tensor, scale: float | None) -> float:
    """What the scores are multiplied with: 1 / sqrt(D) where nothing else is asked for."""
    return 1.0 / math.sqrt(query_BHQD.shape[-1]) if scale is None else scale


def attend(
    query_BHQD: torch.Tensor, key_BGKD: torch.Tensor, value_BGKE: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, (B, H, Q, E), and the logarithm of the sum of the exponentials of the scores, (B, H, Q). A causal
    piece has as many queries as keys, the same ones."""
    if _for_cpu(query_BHQD, value_BGKE):
        result, logarithm = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            query_BHQD, key_BGKD, value_BGKE, 0.0, causal, scale=scale
        )
    elif _flashes(query_BHQD, value_BGKE):
        result, logarithm, *_ = _ATEN._scaled_dot_product_flash_attention(
            query_BHQD, key_BGKD, value_BGKE, 0.0, causal, False, scale=scale
        )
    else:
        result, logarithm = _attend(query_BHQD, key_BGKD, value_BGKE, causal, scale)
    return result, logarithm


def attend_backward(
    gradient_BHQE: torch.Tensor,
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKE: torch.Tensor,
    result_BHQE: torch.Tensor,
    logarithm_BHQ: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a piece adds to the gradients of queries, keys and values. `result` and `logarithm` are those of all pieces
    together."""
    given = (gradient_BHQE, query_BHQD, key_BGKD, value_BGKE, result_BHQE, logarithm_BHQ)
    if _for_cpu(query_BHQD, value_BGKE):
        found = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal, scale=scale)
    elif _flashes(query_BHQD, value_BGKE):
        nothing, no_seed = torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int64)
        lengths = (query_BHQD.shape[2], key_BGKD.shape[2])
        found = _ATEN._scaled_dot_product_flash_attention_backward(
            *given[:5],
            logarithm_BHQ.contiguous(),
            nothing,
            nothing,
            *lengths,
            0.0,
            causal,
            no_seed,
            no_seed,
            scale=scale,
        )
    else:
        found = _attend_backward(*given, causal, scale)
    return found[0], found[1], found[2]


def join(total: torch.Tensor, logarithm: torch.Tensor, made: torch.Tensor, of_hop: torch.Tensor) -> None:
    """Add what a hop made to the result so far and to its log-sum-exp, both in place."""
    joined = torch.logaddexp(logarithm, of_hop)
    total.mul_((logarithm - joined).exp_().unsqueeze(-1))
    total.addcmul_(made, (of_hop - joined).exp_().unsqueeze(-1).to(total.dtype))
    logarithm.copy_(joined)


def attend_to_all(
    query_BHQD: torch.Tensor, key_BGKD: torch.Tensor, value_BGKE: torch.Tensor, causal: bool, scale: float | None
) -> torch.Tensor:
    """`scaled_dot_product_attention` as one piece, (B, H, Q, E): without scores that outlive the call, also where
    PyTorch has no such kernel."""
    factor = scale_of(query_BHQD, scale)
    return _Whole.apply(query_BHQD, key_BGKD, value_BGKE, causal, factor)  # type: ignore[no-any-return, no-untyped-call]


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
    ) -> torch.Tensor:
        made = attend(query, key, value, causal, scale)
        ctx.causal, ctx.scale = causal, scale
        ctx.save_for_backward(query, key, value, *made)
        return made[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, result, logarithm = ctx.saved_tensors
        given = gradients[0].contiguous()
        return (*attend_backward(given, query, key, value, result, logarithm, ctx.causal, ctx.scale), None, None)


def _for_cpu(query: torch.Tensor, value: torch.Tensor) -> bool:
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def _flashes(query: torch.Tensor, value: torch.Tensor) -> bool:
    width = query.shape[-1]
    fits = width == value.shape[-1] and width % _FLASH_DIMS == 0 and width <= _WIDEST
    return query.device.type == "cuda" and fits and query.dtype in _FLASH_DTYPES


@torch.library.custom_op("planner::attention_piece", mutates_args=())
def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(query, key, causal, scale)
    logarithm = torch.logsumexp(scores, dim=-1)
    result = (scores - logarithm.unsqueeze(-1)).exp() @ _shared(wide(value), query)
    return result.to(query.dtype), logarithm


@_attend.register_fake
def _attend_types(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    result = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return result, query.new_empty(query.shape[:-1], dtype=wide_dtype(query))


@torch.library.custom_op("planner::attention_piece_backward", mutates_args=())
def _attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    result: torch.Tensor,
    logarithm: torch.Tensor,
    causal: bool,
    scale: float,
) -> list[torch.Tensor]:
    probabilities = (_scores(query, key, causal, scale) - logarithm.unsqueeze(-1)).exp()
    wider = wide(gradient)
    of_value = probabilities.transpose(-2, -1) @ wider
    inner = (wider * wide(result)).sum(dim=-1, keepdim=True)
    of_scores = probabilities * (wider @ _shared(wide(value), query).transpose(-2, -1) - inner) * scale
    of_query = of_scores @ _shared(wide(key), query)
    of_key = of_scores.transpose(-2, -1) @ wide(query)
    shared = (_summed(of_key, key), _summed(of_value, value))
    return [of_query.to(query.dtype), *shared]


@_attend_backward.register_fake
def _attend_backward_types(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    result: torch.Tensor,
    logarithm: torch.Tensor,
    causal: bool,
    scale: float,
) -> list[torch.Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in (query, key, value)]


def _scores(query: torch.Tensor, key: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    scores = wide(query) @ _shared(wide(key), query).transpose(-2, -1) * scale
    if not causal:
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -math.inf)


def _shared(tensor_BGKD: torch.Tensor, query_BHQD: torch.Tensor) -> torch.Tensor:
    """Keys or values once for each head of queries that shares them."""
    return tensor_BGKD.repeat_interleave(query_BHQD.shape[1] // tensor_BGKD.shape[1], dim=1)


def _summed(gradient_BHKD: torch.Tensor, tensor_BGKD: torch.Tensor) -> torch.Tensor:
    """The gradient of keys or values from that of each head of queries."""
    batch, heads, *rest = gradient_BHKD.shape
    groups = tensor_BGKD.shape[1]
    return gradient_BHKD.reshape(batch, groups, heads // groups, *rest).sum(dim=2).to(tensor_BGKD.dtype)
