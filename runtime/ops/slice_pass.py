"""What the operators of one sequence slice may know of the other slices of their micro-batch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from runtime.ops.attention.biased_attention import wide_dtype
from runtime.ops.attention.hidden import Mask


class Past:
    """Keys and values of one operator for the slices of one micro-batch so far, and later their gradients. Memory for
    the whole sequence is allocated at the first slice."""

    def __init__(self, slices: int) -> None:
        self._slices = slices
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None
        self._gradients: tuple[torch.Tensor, torch.Tensor] | None = None
        self._numbers: dict[int, tuple[torch.Tensor | None, torch.Tensor | None]] = {}

    def keep(self, number: int, key_BGQD: torch.Tensor, value_BGQE: torch.Tensor) -> None:
        """Store the keys and values of slice `number`, from 0."""
        if self._kept is None:
            self._kept = self._empty(key_BGQD), self._empty(value_BGQE)
        for whole, piece in zip(self._kept, (key_BGQD, value_BGQE), strict=True):
            self._of(whole, number).copy_(piece)

    def mask_until(self, number: int, mask: Mask) -> Mask:
        """The mask of slice `number`, from 0, with the token numbers of all slices up to it."""
        self._numbers[number] = (mask.documents, mask.seen)
        parts = zip(*(self._numbers[at] for at in range(number + 1)), strict=True)
        documents, seen = (
            torch.cat(found, dim=1) if (found := [t for t in part if t is not None]) else None for part in parts
        )
        return replace(mask, documents=documents, seen=seen)

    def own(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a slice."""
        assert self._kept is not None, "the first slice came first"
        return self._of(self._kept[0], number), self._of(self._kept[1], number)

    def before(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all slices before it."""
        assert self._kept is not None, "the first slice came first"
        key, value = self._kept
        length = key.shape[2] // self._slices * number
        return key[:, :, :length], value[:, :, :length]

    def add(self, rows: slice, terms: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Add to the gradients of some rows of the whole sequence."""
        if self._gradients is None:
            assert self._kept is not None, "the forward pass came first"
            first, second = (torch.zeros_like(kept, dtype=wide_dtype(kept)) for kept in self._kept)
            self._gradients = first, second
        for whole, term in zip(self._gradients, terms, strict=True):
            whole[:, :, rows] += term

    def gradient(self, number: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The gradient that later slices have added for slice `number`; None where there is none."""
        if self._gradients is None:
            return None
        return self._of(self._gradients[0], number), self._of(self._gradients[1], number)

    def _empty(self, piece: torch.Tensor) -> torch.Tensor:
        batch, groups, length, size = piece.shape
        return piece.new_empty((batch, groups, length * self._slices, size))

    def _of(self, whole: torch.Tensor, number: int) -> torch.Tensor:
        length = whole.shape[2] // self._slices
        return whole.narrow(2, number * length, length)


@dataclass(kw_only=True)
class Together:
    """The shared state of the `count` slices of a micro-batch. `counted` has, by operator, the number of targets of all
    slices in the loss's mean on this rank, divided by `count`, so that the micro-batch's loss is the mean of its
    slices' losses. It lives as long as one of the slices waits for its backward pass."""

    count: int
    counted: Mapping[str, torch.Tensor]
    _pasts: dict[str, Past] = field(default_factory=dict)

    def past_of(self, operator: str) -> Past:
        """Keys and values of an attention operator."""
        if operator not in self._pasts:
            self._pasts[operator] = Past(self.count)
        return self._pasts[operator]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePass:
    """Slice `number`, from 0, of a micro-batch."""

    number: int
    together: Together
