"""Attention to a piece of the keys, as one kernel that also returns the log-sum-exp of the piece's scores.

    y_i = softmax(scale q k_i^T) v_i      l_i = log sum exp(scale q k_i^T)         of piece i, forward
    l = log sum_i exp(l_i)                y = sum_i exp(l_i - l) y_i               of all pieces together
    gradients from q, k_i, v_i, y, l and the gradient of y alone                   of piece i, backward

(Dao et al. 2022, arXiv 2205.14135, section 3.1 and algorithm 4.) A sink of each head is one more piece, of one key
without a value (`planner.models.composed_attention`). PyTorch's fused kernels return l and take it in the backward
pass. CPU kernels need values as wide as keys; accelerator kernels also need 16 bits and a head dim that is a multiple
of 8. No kernel supports a score cap. In all other cases the scores are computed in memory, in float32 at least.

    B batch, H heads, G heads of keys (H / G queries share one), Q queries, K keys, D and E head dims
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from planner.models.composed_attention import capped
from planner.sharding.window import Run
from runtime.ops.attention.biased_attention import wide, wide_dtype
from runtime.ops.attention.hidden import Hidden, Mask
from runtime.ops.kept_results import whole_call

_ATEN = torch.ops.aten
_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_DIMS = 8  # head dims are a multiple of it
_WIDEST = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """Rows of the queries that attend to rows of the keys: to all of them, to those up to their own position
    (`causal`), or to those that are not `hidden`."""

    queries: slice
    keys: slice
    causal: bool = False
    hidden: Hidden | None = None

    def bias(self, query_BHQD: torch.Tensor) -> torch.Tensor | None:
        """The bias that is added to the scores of these queries."""
        return None if self.hidden is None else self.hidden.bias(query_BHQD)


def hops_of(mask: Mask, queries: Sequence[Run], keys: Sequence[Run], width: int) -> tuple[Hop, ...]:
    """The hops of a mask for queries and keys at these positions; `width` is samples x heads."""
    blocks = mask.blocks(queries, keys, width)
    return tuple(Hop(queries=rows, keys=met, hidden=hidden) for rows, met, hidden in blocks)


@dataclass(frozen=True, slots=True)
class Scale:
    """The factor of the scores, and the cap that then limits their magnitude."""

    factor: float
    cap: float | None = None


def scale_of(query_BHQD: torch.Tensor, factor: float | None, cap: float | None = None) -> Scale:
    """The factor is 1 / sqrt(D) by default."""
    return Scale(1.0 / math.sqrt(query_BHQD.shape[-1]) if factor is None else factor, cap)


def attend(
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKE: torch.Tensor,
    causal: bool,
    scale: Scale,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, (B, H, Q, E), and the log-sum-exp of the scores, (B, H, Q). A causal piece has the same positions for
    queries and keys. A `bias` of 0 and minus infinity, (B or 1, 1, Q, K), hides keys; a query that sees none has the
    result 0 and the log-sum-exp minus infinity."""
    if scale.cap is None and _for_cpu(query_BHQD, value_BGKE):
        result, logarithm = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            query_BHQD, key_BGKD, value_BGKE, 0.0, causal, attn_mask=bias, scale=scale.factor
        )
        if bias is not None:  # there the log-sum-exp of a query that sees nothing is 0
            blind = torch.isneginf(bias).all(dim=-1)
            logarithm = logarithm.masked_fill(blind, -math.inf)
    elif scale.cap is None and bias is None and _flashes(query_BHQD, value_BGKE):
        result, logarithm, *_ = _ATEN._scaled_dot_product_flash_attention(
            query_BHQD, key_BGKD, value_BGKE, 0.0, causal, False, scale=scale.factor
        )
    else:
        result, logarithm = _attend(query_BHQD, key_BGKD, value_BGKE, causal, scale.factor, bias, scale.cap)
    return result, logarithm


def attend_backward(
    gradient_BHQE: torch.Tensor,
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKE: torch.Tensor,
    result_BHQE: torch.Tensor,
    logarithm_BHQ: torch.Tensor,
    causal: bool,
    scale: Scale,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The terms of a piece in the gradients of queries, keys and values. `result` and `logarithm` are those of all
    pieces together."""
    given = (gradient_BHQE, query_BHQD, key_BGKD, value_BGKE, result_BHQE, logarithm_BHQ)
    if scale.cap is None and _for_cpu(query_BHQD, value_BGKE):
        found = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, 0.0, causal, attn_mask=bias, scale=scale.factor
        )
    elif scale.cap is None and bias is None and _flashes(query_BHQD, value_BGKE):
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
            scale=scale.factor,
        )
    else:
        found = _attend_backward(*given, causal, scale.factor, bias, scale.cap)
    return found[0], found[1], found[2]


def join(total: torch.Tensor, logarithm: torch.Tensor, made: torch.Tensor, of_hop: torch.Tensor) -> None:
    """Merge the result of a hop into the result and log-sum-exp so far, both in place."""
    joined = torch.logaddexp(logarithm, of_hop)
    shift = _finite(joined)
    total.mul_((logarithm - shift).exp_().unsqueeze(-1))
    total.addcmul_(made, (of_hop - shift).exp_().unsqueeze(-1).to(total.dtype))
    logarithm.copy_(joined)


def _finite(logarithm: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp, with 0 for queries that have seen nothing, so that all their exponentials are 0."""
    return logarithm.masked_fill(torch.isneginf(logarithm), 0.0)


class Attended:
    """Accumulates the attention of queries, hop by hop."""

    def __init__(self, query_BHQD: torch.Tensor, scale: Scale) -> None:
        self._query, self._scale = query_BHQD, scale
        self._total: torch.Tensor | None = None
        self._logarithm = query_BHQD.new_empty(0)

    def see(self, hops: Sequence[Hop], key_BGKD: torch.Tensor, value_BGKE: torch.Tensor) -> None:
        """Attend to these keys and values in some hops."""
        for hop in hops:
            query, key, value = self._query[:, :, hop.queries], key_BGKD[:, :, hop.keys], value_BGKE[:, :, hop.keys]
            made = attend(query, key, value, hop.causal, self._scale, hop.bias(query))
            if self._total is None and query.shape == self._query.shape:
                self._total, self._logarithm = made
                continue
            if self._total is None:
                batch, heads, queries, _ = self._query.shape
                self._total = made[0].new_zeros((batch, heads, queries, value.shape[-1]), dtype=wide_dtype(query))
                self._logarithm = made[1].new_full((batch, heads, queries), -math.inf)
            self._total = wide(self._total)
            join(self._total[:, :, hop.queries], self._logarithm[:, :, hop.queries], *made)

    def result(self, sinks_H: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The result and its log-sum-exp, which the backward pass needs."""
        assert self._total is not None, "every query sees some of the first keys"
        if sinks_H is not None:
            joined = torch.logaddexp(self._logarithm, sinks_H.to(self._logarithm.dtype).view(1, -1, 1))
            share = (self._logarithm - joined).exp_().unsqueeze(-1)
            return (self._total * share).to(self._query.dtype), joined
        return self._total.to(self._query.dtype), _finite(self._logarithm)


class Gradients:
    """Accumulates the gradients of queries hop by hop, and gives those of keys and values. Inputs: the gradient of the
    result, the queries, the result and its log-sum-exp."""

    def __init__(self, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], scale: Scale) -> None:
        self._given, self._scale = given, scale
        self._of_query: torch.Tensor | None = None

    def of(
        self, hops: Sequence[Hop], key_BGKD: torch.Tensor, value_BGKE: torch.Tensor
    ) -> tuple[slice, tuple[torch.Tensor, torch.Tensor]] | None:
        """The rows of these keys and values with gradient terms from some hops, and these terms; None where there are
        none."""
        sums: tuple[torch.Tensor, torch.Tensor] | None = None
        for hop in hops:
            gradient, query, result, logarithm = (tensor[:, :, hop.queries] for tensor in self._given)
            key, value = key_BGKD[:, :, hop.keys], value_BGKE[:, :, hop.keys]
            bias = hop.bias(query)
            made = attend_backward(gradient, query, key, value, result, logarithm, hop.causal, self._scale, bias)
            self._add(hop, made[0])
            if len(hops) == 1:
                return hop.keys, made[1:]
            if sums is None:
                sums = self._zeros(key_BGKD), self._zeros(value_BGKE)
            for total, term in zip(sums, made[1:], strict=True):
                total[:, :, hop.keys].add_(term)
        return None if sums is None else (slice(0, key_BGKD.shape[2]), sums)

    def of_query(self) -> torch.Tensor:
        """Gradients of the queries."""
        assert self._of_query is not None, "every query sees some of the first keys"
        return self._of_query.to(self._given[1].dtype)

    def of_sinks(self, sinks_H: torch.Tensor) -> torch.Tensor:
        """Gradients of the sinks."""
        gradient, _, result, logarithm = self._given
        seen_BHQ = (sinks_H.to(logarithm.dtype).view(1, -1, 1) - logarithm).exp_()
        inner_BHQ = (wide(gradient) * wide(result)).sum(dim=-1)
        return -(seen_BHQ * inner_BHQ).sum(dim=(0, 2)).to(sinks_H.dtype)

    def _add(self, hop: Hop, made: torch.Tensor) -> None:
        if self._of_query is None and made.shape == self._given[1].shape:
            self._of_query = made.to(wide_dtype(made))
            return
        if self._of_query is None:
            self._of_query = self._zeros(self._given[1])
        self._of_query[:, :, hop.queries].add_(made)

    @staticmethod
    def _zeros(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor, dtype=wide_dtype(tensor), memory_format=torch.contiguous_format)


def attend_to_all(
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKE: torch.Tensor,
    hops: Sequence[Hop],
    scale: float | None,
    sinks_H: torch.Tensor | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    """`scaled_dot_product_attention` in these hops, (B, H, Q, E): scores are never kept, also where PyTorch has no such
    kernel."""
    scaled = scale_of(query_BHQD, scale, cap)
    return _Whole.apply(query_BHQD, key_BGKD, value_BGKE, sinks_H, hops, scaled)  # type: ignore[no-any-return, no-untyped-call]


def whole(query_BHQD: torch.Tensor, key_BGKD: torch.Tensor, causal: bool) -> tuple[Hop, ...]:
    """All queries and all keys in one hop."""
    return (Hop(queries=slice(0, query_BHQD.shape[2]), keys=slice(0, key_BGKD.shape[2]), causal=causal),)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        hops: Sequence[Hop],
        scale: Scale,
    ) -> torch.Tensor:
        made = whole_call(lambda: _forward(query, key, value, sinks, hops, scale))
        ctx.hops, ctx.scale = hops, scale
        ctx.save_for_backward(query, key, value, sinks, *made)
        result: torch.Tensor = made[0]
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, result, logarithm = ctx.saved_tensors
        found = Gradients((gradients[0].contiguous(), query, result, logarithm), ctx.scale)
        made = found.of(ctx.hops, key, value)
        assert made is not None
        of_key, of_value = made[1]
        of_sinks = None if sinks is None else found.of_sinks(sinks)
        return found.of_query(), of_key.to(key.dtype), of_value.to(value.dtype), of_sinks, None, None


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    hops: Sequence[Hop],
    scale: Scale,
) -> tuple[torch.Tensor, torch.Tensor]:
    seen = Attended(query, scale)
    seen.see(hops, key, value)
    return seen.result(sinks)


def _for_cpu(query: torch.Tensor, value: torch.Tensor) -> bool:
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def _flashes(query: torch.Tensor, value: torch.Tensor) -> bool:
    width = query.shape[-1]
    fits = width == value.shape[-1] and width % _FLASH_DIMS == 0 and width <= _WIDEST
    return query.device.type == "cuda" and fits and query.dtype in _FLASH_DTYPES


@torch.library.custom_op("planner::attention_piece", mutates_args=())
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    scale: float,
    bias: torch.Tensor | None,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores, _ = _scores(query, key, causal, scale, bias, cap)
    logarithm = torch.logsumexp(scores, dim=-1)
    result = (scores - _finite(logarithm).unsqueeze(-1)).exp() @ _shared(wide(value), query)
    return _token_by_token(result.to(query.dtype)), logarithm


@_attend.register_fake
def _attend_types(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    scale: float,
    bias: torch.Tensor | None,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    result = _token_by_token(query.new_empty((*query.shape[:-1], value.shape[-1])))
    return result, query.new_empty(query.shape[:-1], dtype=wide_dtype(query))


def _token_by_token(result_BHQE: torch.Tensor) -> torch.Tensor:
    """The result with the heads of a token contiguous in memory, as in fused kernels, so that joining them is no
    copy."""
    return result_BHQE.transpose(1, 2).contiguous().transpose(1, 2)


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
    bias: torch.Tensor | None,
    cap: float | None,
) -> list[torch.Tensor]:
    scores, slope = _scores(query, key, causal, scale, bias, cap)
    probabilities = (scores - logarithm.unsqueeze(-1)).exp()
    wider = wide(gradient)
    of_value = probabilities.transpose(-2, -1) @ wider
    inner = (wider * wide(result)).sum(dim=-1, keepdim=True)
    of_scores = probabilities * (wider @ _shared(wide(value), query).transpose(-2, -1) - inner) * scale
    of_scores = of_scores if slope is None else of_scores * slope
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
    bias: torch.Tensor | None,
    cap: float | None,
) -> list[torch.Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in (query, key, value)]


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    causal: bool,
    scale: float,
    bias: torch.Tensor | None,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scores, and the slope of the cap at each."""
    scores, slope = capped(wide(query) @ _shared(wide(key), query).transpose(-2, -1) * scale, cap)
    if bias is not None:
        scores = scores + bias
    if not causal:
        return scores, slope
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -math.inf), slope


def _shared(tensor_BGKD: torch.Tensor, query_BHQD: torch.Tensor) -> torch.Tensor:
    """Keys or values, repeated for each query head that shares them."""
    return tensor_BGKD.repeat_interleave(query_BHQD.shape[1] // tensor_BGKD.shape[1], dim=1)


def _summed(gradient_BHKD: torch.Tensor, tensor_BGKD: torch.Tensor) -> torch.Tensor:
    """The gradient of keys or values, summed over the query heads that share them."""
    batch, heads, *rest = gradient_BHKD.shape
    groups = tensor_BGKD.shape[1]
    return gradient_BHKD.reshape(batch, groups, heads // groups, *rest).sum(dim=2).to(tensor_BGKD.dtype)
