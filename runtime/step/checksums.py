"""Checksums of tensors, in little memory: piece by piece, in buffers that are allocated once.

    tensor ──pieces──▶ values (float64) ─┬─ sum
                                         ├─ sum with weights by position   through one scratch buffer
                                         └─ sum of absolute values

A check of the first step needs only three buffers of one piece each beside the existing memory, and 24 bytes for every
tensor that it has processed: a plan may fill its devices to the last percent.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

Checksum = tuple[float, float, float]
"""Sum, position-weighted sum, and sum of the absolute values of a tensor; non-finite numbers are replaced by finite
ones."""

AT_ONCE: Mapping[str, int] = {"cpu": 1 << 17}
"""Elements that are in memory in float64 at the same time, by device type: 1 MiB for each of the buffers."""
OTHER_AT_ONCE = 1 << 21  # of accelerators, because every kernel launch takes microseconds
_PERIOD = 4093  # a prime: period of the weights that make a sum depend on the order of the elements
_ROWS = 1024  # checksums that are allocated together: a device allocates at least half a KiB


class Checksums:
    """Makes the checksums of tensors of one device, one after the other; they stay as long as this object. `at_once`:
    elements of a piece."""

    def __init__(self, device: torch.device, at_once: int | None = None) -> None:
        self._like: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self._at_once = at_once or AT_ONCE.get(device.type, OTHER_AT_ONCE)
        self._values = torch.empty(self._at_once, **self._like)
        self._scratch = torch.empty(self._at_once, **self._like)
        places = torch.arange(self._at_once + _PERIOD, **self._like)
        self._weights = places.remainder_(_PERIOD).div_(_PERIOD).add_(0.5)
        self._rows: list[torch.Tensor] = []

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The `Checksum` of a tensor, (3,) float64 on its device, without a synchronization."""
        total, start = self._row(), 0
        given = tensor.detach()
        for piece in _pieces(torch.view_as_real(given) if given.is_complex() else given, self._at_once):
            count, first = piece.numel(), start % _PERIOD
            values, scratch = self._values[:count], self._scratch[:count]
            values.copy_(piece.reshape(-1)).nan_to_num_(nan=3.0, posinf=5.0, neginf=-5.0)
            total[0] += values.sum()
            total[1] += torch.mul(values, self._weights[first : first + count], out=scratch).sum()
            total[2] += torch.abs(values, out=scratch).sum()
            start += count
        return total

    def _row(self) -> torch.Tensor:
        """Three zeros in unused memory."""
        if not self._rows:
            self._rows = list(torch.zeros(_ROWS, 3, **self._like).unbind())
        return self._rows.pop()


def _pieces(tensor: torch.Tensor, at_once: int) -> Iterator[torch.Tensor]:
    """The tensor in pieces of limited size, in order."""
    if tensor.numel() <= at_once:
        yield tensor
    else:
        row = tensor.numel() // tensor.shape[0]
        for piece in torch.split(tensor, max(1, at_once // row)):
            yield from _pieces(piece[0], at_once) if len(piece) == 1 else (piece,)
