"""Causal attention of one slice of the sequence, to itself and to the slices before it.

    forward     slice 0, 1, 2, ..     keys and values are written down; a slice reads those that are there
    backward    slice .., 2, 1, 0     a slice adds to the gradients of those before it, and takes what later ones left

The slices of one micro-batch come in this order on every stage (`costmodels.orders`, slices; Li et al. 2021, TeraPipe).
A block that is recomputed writes the same keys once more where they are already.

Shape legend: as in `runtime.ops.attention_pieces`; S the whole sequence, Q a slice of it.
"""

from typing import Any

import torch

from runtime.ops.attention_pieces import attend, attend_backward, join, scale_of
from runtime.ops.biased_attention import wide
from runtime.ops.kept_results import whole_call
from runtime.ops.slice_pass import SlicePass


def sliced_attention(
    query_BHQD: torch.Tensor,
    key_BGQD: torch.Tensor,
    value_BGQE: torch.Tensor,
    part: SlicePass,
    operator: str,
    scale: float | None,
) -> torch.Tensor:
    """The result B H Q E of an operator for one slice of the sequence."""
    return _SlicedAttention.apply(query_BHQD, key_BGQD, value_BGQE, part, operator, scale)  # type: ignore[no-any-return, no-untyped-call]


class _SlicedAttention(torch.autograd.Function):
    """Keeps the query and the result; keys and values are written down anyway."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        part: SlicePass,
        operator: str,
        scale: float | None,
    ) -> torch.Tensor:
        past, number = part.together.past_of(operator), part.number
        factor = scale_of(query, scale)
        past.keep(number, key, value)

        def compute() -> tuple[torch.Tensor, torch.Tensor]:
            result, logarithm = attend(query, *past.own(number), True, factor)
            if number:
                total = wide(result)
                join(total, logarithm, *attend(query, *past.before(number), False, factor))
                result = total.to(query.dtype)
            return result, logarithm

        result, logarithm = whole_call(compute)
        ctx.part, ctx.past, ctx.scale = part, past, factor  # what slices share lives on with any of them
        ctx.save_for_backward(query, result, logarithm)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, result, logarithm = ctx.saved_tensors
        past, number, scale = ctx.past, ctx.part.number, ctx.scale
        given = gradients[0].contiguous()
        key, value = past.own(number)
        of_query, of_key, of_value = attend_backward(given, query, key, value, result, logarithm, True, scale)
        if number:
            key, value = past.before(number)
            early, *before = attend_backward(given, query, key, value, result, logarithm, False, scale)
            of_query = of_query + early
            past.add(number, *before)
        later = past.gradient(number)
        if later is not None:
            of_key, of_value = (own + left.to(own.dtype) for own, left in zip((of_key, of_value), later, strict=True))
        return of_query, of_key, of_value, None, None, None
