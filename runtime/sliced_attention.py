"""Causal attention of one slice of the sequence, to itself and to the slices before it.

    forward     slice 0, 1, 2, ..     keys and values are written down; a slice reads those that are there
    backward    slice .., 2, 1, 0     a slice adds to the gradients of those before it, and takes what later ones left

The slices of one micro-batch come in this order on every stage (`costmodels.orders`, slices; Li et al. 2021, TeraPipe).
A block that is recomputed writes the same keys once more where they are already.

Shape legend: as in `runtime.partial_attention`; S the whole sequence, Q a slice of it.
"""

from typing import Any

import torch

from runtime.partial_attention import Attended, attend, attend_backward, combined


class Past:
    """Keys and values of one operator for the slices of one micro-batch so far, and later their gradients. Their memory
    is that of the whole sequence from the first slice on."""

    def __init__(self, slices: int) -> None:
        self._slices = slices
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None
        self._gradients: tuple[torch.Tensor, torch.Tensor] | None = None

    def keep(self, number: int, key_BGQD: torch.Tensor, value_BGQE: torch.Tensor) -> None:
        """Write down what slice `number` has, 0 first."""
        if self._kept is None:
            self._kept = self._empty(key_BGQD), self._empty(value_BGQE)
        for whole, piece in zip(self._kept, (key_BGQD, value_BGQE), strict=True):
            self._of(whole, number).copy_(piece)

    def own(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a slice."""
        assert self._kept is not None, "the first slice came first"
        return self._of(self._kept[0], number), self._of(self._kept[1], number)

    def before(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of all slices before it."""
        assert self._kept is not None, "the first slice came first"
        key, value = self._kept
        length = key.shape[2] // self._slices * number
        return key[:, :, :length], value[:, :, :length]

    def add(self, number: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Add to the gradients of all slices before `number`."""
        if self._gradients is None:
            assert self._kept is not None, "the forward pass came first"
            first, second = (torch.zeros_like(kept, dtype=_wide(kept.dtype)) for kept in self._kept)
            self._gradients = first, second
        for whole, term in zip(self._gradients, (key, value), strict=True):
            whole[:, :, : term.shape[2]] += term

    def gradient(self, number: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What later slices have left for slice `number`; None where there is none."""
        if self._gradients is None:
            return None
        return self._of(self._gradients[0], number), self._of(self._gradients[1], number)

    def _empty(self, piece: torch.Tensor) -> torch.Tensor:
        batch, groups, length, size = piece.shape
        return piece.new_empty((batch, groups, length * self._slices, size))

    def _of(self, whole: torch.Tensor, number: int) -> torch.Tensor:
        length = whole.shape[2] // self._slices
        return whole.narrow(2, number * length, length)


def sliced_attention(
    query_BHQD: torch.Tensor,
    key_BGQD: torch.Tensor,
    value_BGQE: torch.Tensor,
    past: Past,
    number: int,
    scale: float | None,
) -> torch.Tensor:
    """The result B H Q E for slice `number` of the sequence."""
    return _SlicedAttention.apply(query_BHQD, key_BGQD, value_BGQE, past, number, scale)  # type: ignore[no-any-return, no-untyped-call]


class _SlicedAttention(torch.autograd.Function):
    """Keeps the query and the result; keys and values are written down anyway."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        past: Past,
        number: int,
        scale: float | None,
    ) -> torch.Tensor:
        past.keep(number, key, value)
        own, before = past.own(number), past.before(number)
        found = attend(query, *own, causal=True, scale=scale)
        if number:
            found = combined(attend(query, *before, causal=False, scale=scale), found)
        ctx.past, ctx.number, ctx.scale = past, number, scale
        ctx.save_for_backward(query, *found)
        return found.result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, result, log_sum = ctx.saved_tensors
        past, number, scale = ctx.past, ctx.number, ctx.scale
        given, whole = gradients[0].contiguous(), Attended(result, log_sum)
        key, value = past.own(number)
        of_query, of_key, of_value = attend_backward(given, query, key, value, whole, causal=True, scale=scale)
        if number:
            key, value = past.before(number)
            early, *before = attend_backward(given, query, key, value, whole, causal=False, scale=scale)
            of_query = of_query + early
            past.add(number, *before)
        later = past.gradient(number)
        if later is not None:
            of_key, of_value = (own + left.to(own.dtype) for own, left in zip((of_key, of_value), later, strict=True))
        return of_query, of_key, of_value, None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Terms of many slices are added up in float32 at least."""
    return torch.promote_types(dtype, torch.float32)
