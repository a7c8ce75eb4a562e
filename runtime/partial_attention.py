"""Attention to some of the keys, to be combined with attention to others: results with their log-sum-exp.

    o_j = softmax(q k_j' scale) v_j     l_j = log sum exp(q k_j' scale)         for each piece j of the keys
    l = log sum_j exp(l_j)              o = sum_j exp(l_j - l) o_j              for all of them

The gradients of a piece need the result and the log-sum-exp over all pieces, not its own: with those the kernel's
probabilities exp(q k_j' scale - l) are already the right ones. So every piece is differentiated by itself, once.

Sources: Milakov and Gimelshein 2018 (arXiv 1805.02867), online softmax; Dao et al. 2022 (arXiv 2205.14135), appendix
B.4, the gradients; Liu et al. 2023 (arXiv 2310.01889), pieces on several devices.

Shape legend: B batch, H heads, G key and value heads (a divisor of H; a head reads group h G / H), Q queries, K keys,
D size of a query and a key, E size of a value.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

_FLASH_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Attended(NamedTuple):
    """`result` B H Q E in the dtype of the queries, `log_sum` B H Q in float32 or wider."""

    result: torch.Tensor
    log_sum: torch.Tensor


def attend(
    query_BHQD: torch.Tensor, key_BGKD: torch.Tensor, value_BGKE: torch.Tensor, *, causal: bool, scale: float | None
) -> Attended:
    """Attention to these keys alone. `causal`: query i reads the keys up to i, of as many as there are queries. `scale`
    of the scores is 1 / sqrt(D) where it is None. Scores are not stored on CPUs; elsewhere they are."""
    factor = _scale(query_BHQD, scale)
    if _on_cpu(query_BHQD):
        query, key, value = _of_one_size(query_BHQD, key_BGKD, value_BGKE)
        result, log_sum = _FLASH_CPU(query, key, value, 0.0, causal, scale=factor)
        return Attended(result[..., : value_BGKE.shape[-1]], log_sum)
    scores = _scores(query_BHQD, key_BGKD, causal, factor)
    log_sum = scores.logsumexp(dim=-1)
    probabilities = (scores - log_sum.unsqueeze(-1)).exp().to(value_BGKE.dtype)
    return Attended(probabilities @ _each_head(value_BGKE, query_BHQD.shape[1]), log_sum)


def attend_backward(
    gradient_BHQE: torch.Tensor,
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKE: torch.Tensor,
    whole: Attended,
    *,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What these keys add to the gradient of the queries, and the gradients of these keys and values; `whole` is
    attention to all keys."""
    factor = _scale(query_BHQD, scale)
    if _on_cpu(query_BHQD):
        size = query_BHQD.shape[-1]
        query, key, value = _of_one_size(query_BHQD, key_BGKD, value_BGKE)
        gradient, result = (F.pad(t, (0, value.shape[-1] - t.shape[-1])) for t in (gradient_BHQE, whole.result))
        found = _FLASH_CPU_BACKWARD(gradient, query, key, value, result, whole.log_sum, 0.0, causal, scale=factor)
        return found[0][..., :size], found[1][..., :size], found[2][..., : value_BGKE.shape[-1]]
    heads = query_BHQD.shape[1]
    scores = _scores(query_BHQD, key_BGKD, causal, factor)
    probabilities = (scores - whole.log_sum.unsqueeze(-1)).exp()
    wide = gradient_BHQE.to(probabilities.dtype)
    of_probabilities = wide @ _each_head(value_BGKE, heads).to(wide.dtype).transpose(-1, -2)
    share = (wide * whole.result.to(wide.dtype)).sum(dim=-1, keepdim=True)
    of_scores = probabilities * (of_probabilities - share) * factor
    query = of_scores @ _each_head(key_BGKD, heads).to(wide.dtype)
    key = _each_group(of_scores.transpose(-1, -2) @ query_BHQD.to(wide.dtype), key_BGKD.shape[1])
    value = _each_group(probabilities.transpose(-1, -2) @ wide, value_BGKE.shape[1])
    return query.to(query_BHQD.dtype), key.to(key_BGKD.dtype), value.to(value_BGKE.dtype)


def combined(first: Attended, second: Attended) -> Attended:
    """Attention to the keys of both."""
    log_sum = torch.logaddexp(first.log_sum, second.log_sum)
    left, right = ((one.log_sum - log_sum).exp().unsqueeze(-1) * one.result for one in (first, second))
    return Attended((left + right).to(first.result.dtype), log_sum)


def _on_cpu(tensor: torch.Tensor) -> bool:
    """Whether there is a kernel that returns the log-sum-exp for every dtype."""
    return tensor.device.type == "cpu"


def _scale(query_BHQD: torch.Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query_BHQD.shape[-1]) if scale is None else scale


def _of_one_size(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """With heads of the largest size among them: zeros change no score and no value. In one piece each."""
    size = max(tensor.shape[-1] for tensor in tensors)
    padded = [F.pad(t, (0, size - t.shape[-1])) if t.shape[-1] < size else t for t in tensors]
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in padded]


def _scores(query_BHQD: torch.Tensor, key_BGKD: torch.Tensor, causal: bool, factor: float) -> torch.Tensor:
    product = query_BHQD @ _each_head(key_BGKD, query_BHQD.shape[1]).transpose(-1, -2)
    scores = product.to(torch.promote_types(product.dtype, torch.float32)) * factor
    if not causal:
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -math.inf)


def _each_head(grouped: torch.Tensor, heads: int) -> torch.Tensor:
    return grouped.repeat_interleave(heads // grouped.shape[1], dim=1)


def _each_group(per_head: torch.Tensor, groups: int) -> torch.Tensor:
    return torch.unflatten(per_head, 1, (groups, -1)).sum(dim=2)
