"""Causal attention of one sequence slice, to itself and to the slices before it.

    forward     slice 0, 1, 2, ..     keys and values are stored; a slice reads all stored ones
    backward    slice .., 2, 1, 0     a slice adds to the gradients of earlier slices, and takes what later ones added

The slices of one micro-batch run in this order on every stage (`costmodels.pipelines.orders`, slices; Li et al. 2021,
TeraPipe). A recomputed block stores the same keys again in the same place.

Shape legend: as in `runtime.ops.attention.attention_pieces`; S the whole sequence, Q a slice of it.
"""

from typing import Any

import torch

from runtime.ops.attention.attention_pieces import Attended, Gradients, Hop, Scale, hops_of, scale_of
from runtime.ops.attention.hidden import Mask
from runtime.ops.kept_results import whole_call
from runtime.ops.slice_pass import SlicePass


def sliced_attention(
    query_BHQD: torch.Tensor,
    key_BGQD: torch.Tensor,
    value_BGQE: torch.Tensor,
    part: SlicePass,
    operator: str,
    scale: float | None,
    mask: Mask | None = None,
    sinks_H: torch.Tensor | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    """The result B H Q E of an operator for one sequence slice. The token numbers of `mask` are those of the slice."""
    if mask is not None:
        mask = part.together.past_of(operator).mask_until(part.number, mask)
    scaled = scale_of(query_BHQD, scale, cap)
    return _SlicedAttention.apply(query_BHQD, key_BGQD, value_BGQE, sinks_H, part, operator, scaled, mask)  # type: ignore[no-any-return, no-untyped-call]


class _SlicedAttention(torch.autograd.Function):
    """Keeps the query and the result; keys and values are stored anyway."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        part: SlicePass,
        operator: str,
        scale: Scale,
        mask: Mask | None,
    ) -> torch.Tensor:
        past, number = part.together.past_of(operator), part.number
        past.keep(number, key, value)
        own, before = _hops(query, number, mask)

        def compute() -> tuple[torch.Tensor, torch.Tensor]:
            seen = Attended(query, scale)
            seen.see(own, *past.own(number))
            seen.see(before, *past.before(number))
            return seen.result(sinks)

        result, logarithm = whole_call(compute)
        ctx.part, ctx.past, ctx.scale = part, past, scale  # the slices' shared state lives as long as any of them
        ctx.hops = own, before
        ctx.save_for_backward(query, sinks, result, logarithm)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, sinks, result, logarithm = ctx.saved_tensors
        past, number, (own, before) = ctx.past, ctx.part.number, ctx.hops
        found = Gradients((gradients[0].contiguous(), query, result, logarithm), ctx.scale)
        made, earlier = found.of(own, *past.own(number)), found.of(before, *past.before(number))
        assert made is not None
        if earlier is not None:
            past.add(*earlier)
        of_key, of_value = (term.to(query.dtype) for term in made[1])
        later = past.gradient(number)
        if later is not None:
            of_key, of_value = (own + left.to(own.dtype) for own, left in zip((of_key, of_value), later, strict=True))
        of_sinks = None if sinks is None else found.of_sinks(sinks)
        return found.of_query(), of_key, of_value, of_sinks, None, None, None, None


def _hops(query: torch.Tensor, number: int, mask: Mask | None) -> tuple[tuple[Hop, ...], tuple[Hop, ...]]:
    """The hops of a slice over its own keys, and over those of the slices before it."""
    length = query.shape[2]
    if mask is not None:
        run, width = (number * length, length), query.shape[0] * query.shape[1]
        earlier = ((0, number * length),) if number else ()
        return hops_of(mask, (run,), (run,), width), hops_of(mask, (run,), earlier, width)
    every = slice(0, length)
    earlier_hops = (Hop(queries=every, keys=slice(0, number * length)),) if number else ()
    return (Hop(queries=every, keys=every, causal=True),), earlier_hops
