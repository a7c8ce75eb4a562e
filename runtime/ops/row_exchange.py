"""Rows on their way to the devices of their experts, and back.

    rows sorted by expert ──all-to-all──> pieces of n devices, each sorted ──sort──> rows sorted by expert
                        counts of the experts go ahead, as nobody knows how many rows will come

Over several axes one after the other: after each the experts that are left are those of this device's coordinate, so
that rows which are sorted by expert are sorted by the next coordinate, too. Back the same ways in the opposite order.
Rows of experts that have a capacity are as many on every device, and no counts are sent.

Where tensors are fake nobody knows counts: then every device gets the same number of rows, times the imbalance, as the
prediction has it (see `runtime.auditing.imitation`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from runtime.waiting import waiting_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One all-to-all: rows that go to and come from each process of the group."""

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """All ways of the rows of one call; none where rows stay. Its `tensors` are for autograd to keep: how many rows
    each expert of this device has, and for each way the order that sorts by expert what comes, and its inverse."""

    ways: tuple[Way, ...]
    tensors: Sequence[torch.Tensor]

    @property
    def counts(self) -> torch.Tensor:
        return self.tensors[0]

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of this device's tokens, sorted by expert, to rows of this device's experts, sorted by expert."""
        for number, way in enumerate(self.ways):
            rows = _exchanged(rows, way.received, way.sent, way.group).index_select(0, self.tensors[1 + 2 * number])
        return rows

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """The other way."""
        for number, way in reversed([*enumerate(self.ways)]):
            rows = _exchanged(rows.index_select(0, self.tensors[2 + 2 * number]), way.sent, way.received, way.group)
        return rows


def plan_journey(
    counts_E: torch.Tensor,
    rows: int,
    groups: Sequence[dist.ProcessGroup],
    *,
    experts: int,
    capped: bool,
    imbalance: float,
) -> Journey:
    """How so many rows travel, of which each expert has `counts_E`. The `experts` of the model, or those of them that
    are within reach, are cut over the groups, the first of them outermost; if they are `capped` each has as many rows
    of every device. Collective over every group."""
    ways, tensors = [], []
    for number, group in enumerate(groups):
        size = group.size()
        sent_nE = counts_E.view(size, -1)
        received_nE = sent_nE if capped else _counts(sent_nE, experts, group)
        total = rows if number or capped else round(rows * imbalance)
        sent = [rows // size] * size if capped else _splits(sent_nE, rows)
        received = [rows // size] * size if capped else _splits(received_nE, total)
        rows = sum(received)
        numbers = torch.arange(received_nE.shape[1], device=counts_E.device).repeat(size)
        order = torch.argsort(torch.repeat_interleave(numbers, received_nE.flatten(), output_size=rows), stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(rows, device=counts_E.device))
        ways.append(Way(group=group, sent=sent, received=received))
        tensors += [order, places]
        counts_E = received_nE.sum(0)
    return Journey(ways=tuple(ways), tensors=(counts_E, *tensors))


def kept_rows(counts: torch.Tensor, expected: float) -> int:
    """How many rows these counts sum up to; `expected` where nobody knows."""
    return round(expected) if isinstance(counts, FakeTensor) else int(counts.sum())


def _counts(sent_nE: torch.Tensor, experts: int, group: dist.ProcessGroup) -> torch.Tensor:
    """How many rows of each expert come from each process. What is sent has room for all experts, whichever are left:
    its size is known without the ways before."""
    size, left = sent_nE.shape
    outgoing = sent_nE.new_zeros((size, experts // size))
    outgoing[:, :left] = sent_nE
    incoming = torch.empty_like(outgoing)
    waiting_for(dist.all_to_all_single, incoming, outgoing, group=group)
    return incoming[:, :left]


def _splits(counts_nE: torch.Tensor, total: int) -> list[int]:
    """Rows of each process; `total` divided evenly where nobody knows."""
    size = counts_nE.shape[0]
    if isinstance(counts_nE, FakeTensor):
        return [total // size + (at < total % size) for at in range(size)]
    found: list[int] = counts_nE.sum(1).tolist()
    return found


def _exchanged(rows: torch.Tensor, to: list[int], of: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    incoming = rows.new_empty((sum(to), *rows.shape[1:]))
    waiting_for(dist.all_to_all_single, incoming, rows.contiguous(), to, of, group=group)
    return incoming
