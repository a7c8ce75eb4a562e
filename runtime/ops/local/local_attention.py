"""Attention on local tensors: fused, as a ring, in a slice of the sequence, with dropout."""

import torch
import torch.nn.functional as F

from planner.models.composed_attention import composed_attention
from planner.sharding.window import Window
from runtime.ops.attention.attention_pieces import attend_to_all, hops_of, whole
from runtime.ops.attention.biased_attention import biased_attention
from runtime.ops.attention.hidden import Mask
from runtime.ops.attention.ring_attention import Ring, ring_attention
from runtime.ops.attention.sliced_attention import sliced_attention
from runtime.ops.attention.with_dropout import attention_with_dropout
from runtime.ops.randomness import Region, keep_mask
from runtime.ops.shard import Shard
from runtime.ops.slice_pass import SlicePass


def fused_attention(
    shard: Shard,
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKE: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Fused kernels need each head's vectors to be contiguous; for other strides PyTorch would store the scores. On
    CPUs it would also do so for a trained bias, and where values are not as wide as keys (2.13)."""
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query_BHQD, key_BGKD, value_BGKE))
    if shard.ring is not None:
        return ring_attention(query, key, value, _ring(shard, shard.ring, is_causal), scale)
    key, value = shard.shared(key), shard.shared(value)
    if attn_mask is not None and attn_mask.requires_grad and attn_mask.device.type == "cpu" and not enable_gqa:
        return biased_attention(query, key, value, attn_mask, scale)
    if attn_mask is None and query.device.type == "cpu" and query.shape[-1] != value.shape[-1]:
        return attend_to_all(query, key, value, whole(query, key, is_causal), scale)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _ring(shard: Shard, axis: int, causal: bool, mask: Mask | None = None) -> Ring:
    place = shard.place
    return Ring(
        group=place.group(axis),
        place=place.coordinate[axis],
        causal=causal,
        zigzag=axis in place.mesh.zigzag,
        heads=shard.heads,
        mask=mask,
    )


def windowed_attention(
    shard: Shard,
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKE: torch.Tensor,
    documents_BS: torch.Tensor | None,
    seen_BS: torch.Tensor | None,
    sinks_H: torch.Tensor | None = None,
    *,
    back: int | None,
    ahead: int | None,
    prefix: int,
    chunk: int | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    cap: float | None = None,
) -> torch.Tensor:
    """Attention under a mask of a known kind: computed in blocks, from the keys that some query of each block sees.
    Where PyTorch has no fused kernel for blocks, as on GPUs, a mask tensor is built for the kernel that it has, except
    in rings and with sinks or a cap, which that kernel does not support."""
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query_BHQD, key_BGKD, value_BGKE))
    mask = Mask(window=Window(back=back, ahead=ahead, prefix=prefix, chunk=chunk), documents=documents_BS, seen=seen_BS)
    if shard.ring is not None:
        return ring_attention(query, key, value, _ring(shard, shard.ring, False, mask), scale, sinks_H, cap)
    if query.device.type != "cpu" and sinks_H is None and cap is None:
        return under_whole_mask(query, shard.shared(key), shard.shared(value), mask, scale)
    run = ((0, query.shape[2]),)
    hops = hops_of(mask, run, run, query.shape[0] * query.shape[1])
    if query.device.type != "cpu" and cap is None and mask == Mask(window=Window(ahead=0)):
        hops = whole(query, key, True)
    return attend_to_all(query, shard.shared(key), shard.shared(value), hops, scale, sinks_H, cap)


def composed(
    shard: Shard,
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKE: torch.Tensor,
    sinks_H: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    """Attention with sinks or a cap under a mask that is a tensor."""
    key, value = shard.shared(key_BGKD), shard.shared(value_BGKE)
    made: torch.Tensor = composed_attention(query_BHQD, key, value, sinks_H, mask, causal, scale, cap)
    return made


def under_whole_mask(
    query_BHQD: torch.Tensor, key_BGKD: torch.Tensor, value_BGKE: torch.Tensor, mask: Mask, scale: float | None
) -> torch.Tensor:
    """PyTorch's own kernel, with a mask over all pairs."""
    hidden, grouped = mask.whole(query_BHQD.shape[2]).bias(query_BHQD), query_BHQD.shape[1] != key_BGKD.shape[1]
    return F.scaled_dot_product_attention(
        query_BHQD, key_BGKD, value_BGKE, attn_mask=hidden, scale=scale, enable_gqa=grouped
    )


def windowed_attention_of_slice(
    shard: Shard,
    part: SlicePass,
    query_BHQD: torch.Tensor,
    key_BGQD: torch.Tensor,
    value_BGQE: torch.Tensor,
    documents_BS: torch.Tensor | None,
    seen_BS: torch.Tensor | None,
    sinks_H: torch.Tensor | None = None,
    *,
    back: int | None,
    ahead: int,
    prefix: int,
    chunk: int | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    cap: float | None = None,
) -> torch.Tensor:
    mask = Mask(window=Window(back=back, ahead=ahead, prefix=prefix, chunk=chunk), documents=documents_BS, seen=seen_BS)
    key, value = shard.shared(key_BGQD), shard.shared(value_BGQE)
    return sliced_attention(query_BHQD, key, value, part, shard.bound.operator.name, scale, mask, sinks_H, cap)


def attention_of_slice(
    shard: Shard,
    part: SlicePass,
    query_BHQD: torch.Tensor,
    key_BGQD: torch.Tensor,
    value_BGQE: torch.Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    key, value = shard.shared(key_BGQD), shard.shared(value_BGQE)
    return sliced_attention(query_BHQD, key, value, part, shard.bound.operator.name, scale)


def dropping_attention(
    shard: Shard,
    key: int,
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKE: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Keys are whole on every rank, so the piece of the scores is the piece of the result with all keys in its last
    dim."""
    key_BGKD, value_BGKE = shard.shared(key_BGKD), shard.shared(value_BGKE)
    start, shape = shard.region.start, shard.region.shape
    scores = Region(start=(*start[:-1], 0), shape=(*shape[:-1], key_BGKD.shape[-2]))
    return attention_with_dropout(
        query_BHQD,
        key_BGKD,
        value_BGKE,
        keep_mask(key, scores, dropout_p, query_BHQD.device),
        dropout_p,
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        first_query=start[2],
    )
