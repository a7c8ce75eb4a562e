"""Cells of the state, sent from rank to rank."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from runtime.recovery.replica_placement import Cell

_ROUND = 256 * 2**20  # bytes in flight at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A cell that one rank sends to another."""

    cell: Cell
    source: int
    target: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def transfer(
    transfers: Sequence[Transfer], own: int, read: Callable[[Cell], torch.Tensor], device: torch.device
) -> dict[Cell, torch.Tensor]:
    """Send this rank's cells, and return those that it receives, on the CPU. Collective: every rank gives the same
    transfers.

    Tensors are sent as bytes, so every dtype works.
    """
    found: dict[Cell, torch.Tensor] = {}
    for together in _rounds(transfers):
        operations, arriving = [], []
        for one in together:
            if not one.bytes or own not in (one.source, one.target):
                continue
            if own == one.source:
                raw = read(one.cell).detach().contiguous().reshape(-1).view(torch.uint8).to(device)
                operations.append(dist.P2POp(dist.isend, raw, one.target))
            else:
                raw = torch.empty(one.bytes, dtype=torch.uint8, device=device)
                operations.append(dist.P2POp(dist.irecv, raw, one.source))
                arriving.append((one, raw))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        found.update((one.cell, raw.cpu().view(one.dtype).reshape(one.shape)) for one, raw in arriving)
    for one in transfers:
        if own == one.target and not one.bytes:
            found[one.cell] = torch.empty(one.shape, dtype=one.dtype)
    return found


def _rounds(transfers: Sequence[Transfer]) -> Iterator[list[Transfer]]:
    """Groups of transfers that are made together."""
    together: list[Transfer] = []
    total = 0
    for one in transfers:
        if together and total + one.bytes > _ROUND:
            yield together
            together, total = [], 0
        together.append(one)
        total += one.bytes
    if together:
        yield together
