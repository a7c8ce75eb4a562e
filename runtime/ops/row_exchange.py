"""Sends token rows to the devices of their experts (dispatch), and back (combine).

    rows sorted by expert ──all-to-all──> pieces of n devices, each sorted ──sort──> rows sorted by expert
                        the experts' row counts are sent first, because receivers do not know them

Several axes are crossed one after the other. After each, the remaining experts are those of this device's coordinate,
so rows that are sorted by expert are also sorted by the next coordinate. The way back is the same in reverse order.
Experts with a capacity have equally many rows on every device, and no counts are sent.

A token may be sent `Once` to each process of the outermost group, with the positions of its rows:

    tokens ──index──> one row for each process that has any of its experts ──all-to-all──> ──index──> rows ──sort──> ...
    tokens <──sum─── one row from each of these <──all-to-all── sums of the rows of each token <──── rows <──sort── ...

With fake tensors counts are unknown: then every device gets the same number of rows, times the imbalance, as in the
prediction (see `runtime.auditing.imitation`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from planner.models.experts.fp8 import unpacked_tokens
from runtime.waiting import Pending, waiting_for, waiting_for_work


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One all-to-all: the numbers of rows to and from each process of the group."""

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]


class _Leg:
    """One all-to-all in flight. The send buffer is kept alive until arrival."""

    def __init__(self, work: Pending, group: dist.ProcessGroup, sent: torch.Tensor, incoming: torch.Tensor) -> None:
        self._work, self._group, self._sent, self._incoming = work, group, sent, incoming

    def land(self) -> torch.Tensor:
        """The received rows."""
        waiting_for_work(self._work, self._group)
        incoming = self._incoming
        del self._sent, self._incoming
        return incoming


class UnderWay:
    """Rows in flight: one all-to-all of their journey has started. `land` waits for it and does the `rest` of the
    journey."""

    def __init__(self, leg: _Leg, rest: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self._leg, self._rest = leg, rest

    def land(self) -> torch.Tensor:
        """The rows at the end of their journey."""
        come = self._leg.land()
        return come if self._rest is None else self._rest(come)


class Stayed:
    """Rows that need no all-to-all."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def land(self) -> torch.Tensor:
        """The rows."""
        return self._rows


class Unpacking:
    """Tokens in flight in 8 bits, with `like`'s dtype and this number of elements after unpacking."""

    def __init__(self, going: UnderWay | Stayed, hidden: int, like: torch.Tensor) -> None:
        self._going, self._hidden, self._like = going, hidden, like

    def land(self) -> torch.Tensor:
        """The rows in the form in which they are multiplied."""
        rows: torch.Tensor = unpacked_tokens(self._going.land(), self._hidden, self._like)
        return rows


Going: TypeAlias = UnderWay | Stayed | Unpacking


@dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """All all-to-alls of the rows of one call; none where rows stay. Its `tensors` are kept by autograd: the row counts
    of this device's experts, and for each all-to-all the order that sorts received rows by expert, and its inverse.
    Where tokens are sent `once` over the first all-to-all there are two more: the token of each row that is sent, and
    for each row, in the order of the experts, the received row that it copies."""

    ways: tuple[Way, ...]
    tensors: Sequence[torch.Tensor]
    once: Way | None = None

    @property
    def counts(self) -> torch.Tensor:
        return self.tensors[0]

    def there(self, rows: torch.Tensor) -> UnderWay | Stayed:
        """Start to send rows of this device's tokens, sorted by expert; they become rows of this device's experts,
        sorted by expert. The first all-to-all is started; others follow when it has arrived."""
        if not self.ways:
            return Stayed(rows)
        way, order = self.ways[0], self.tensors[1]

        def rest(come: torch.Tensor) -> torch.Tensor:
            return self._later().all_there(come.index_select(0, order))

        return UnderWay(_started(rows, way.received, way.sent, way.group), rest)

    def all_there(self, rows: torch.Tensor) -> torch.Tensor:
        """The same, waiting for all of it."""
        return self.there(rows).land()

    def back(self, given: list[torch.Tensor]) -> Going:
        """Start the way back; the last all-to-all in flight is the first one of `there`. The rows are taken out of the
        list in which they are given, so that if the caller has no other reference, they are freed as soon as they are
        copied into sending order."""
        if not self.ways:
            return Stayed(given.pop())
        way, places = self.ways[0], self.tensors[2]
        rows = self._later().back(given).land().index_select(0, places)
        return UnderWay(_started(rows, way.sent, way.received, way.group))

    def tokens_there(self, x_NH: torch.Tensor) -> UnderWay | Stayed:
        """Start to send this device's tokens, once to each process of the first all-to-all; they become rows of its
        experts."""
        once = self.once
        assert once is not None, "rows go by themselves"
        tokens, copied = self.tensors[-2:]

        def rest(come: torch.Tensor) -> torch.Tensor:
            return self._later().all_there(come.index_select(0, copied))

        return UnderWay(_started(x_NH.index_select(0, tokens), once.received, once.sent, once.group), rest)

    def tokens_back(self, given: list[torch.Tensor], count: int) -> Going:
        """Start to send back the sums of the rows of each of `count` tokens, summed first where the rows are, `count`
        H. Rows are given as to `back`."""
        once = self.once
        assert once is not None, "rows come back by themselves"
        tokens, copied = self.tensors[-2:]
        sums = _summed(self._later().back(given).land(), copied, sum(once.received))
        started = _started(sums, once.sent, once.received, once.group)
        return UnderWay(started, lambda come: _summed(come, tokens, count))

    def _later(self) -> "Journey":
        """All all-to-alls but the first."""
        further = self.tensors[3:] if self.once is None else self.tensors[3:-2]
        return Journey(ways=self.ways[1:], tensors=(self.tensors[0], *further))


def _summed(rows: torch.Tensor, to: torch.Tensor, count: int) -> torch.Tensor:
    """Rows summed into the `count` places that `to` gives; narrow dtypes in float32, as combine kernels do."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    sums = rows.new_zeros((count, *rows.shape[1:]), dtype=wide).index_add_(0, to, rows.to(wide))
    return sums.to(rows.dtype)


def plan_journey(
    counts_E: torch.Tensor,
    rows: int,
    groups: Sequence[dist.ProcessGroup],
    *,
    experts: int,
    capped: bool,
    imbalance: float,
) -> Journey:
    """The journey of rows of which each expert has `counts_E`. The model's `experts`, or those within reach, are
    sharded over the groups, the first group outermost; if they are `capped`, each has the same number of rows from
    every device. Collective over every group."""
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


def once(journey: Journey, tokens_R: torch.Tensor, tokens: int, share: float) -> Journey:
    """The same journey, with tokens that are sent once to each process of the first all-to-all; row r is of token
    `tokens_R[r]` of `tokens`. Where counts are unknown, `share` of the rows are sent. Collective over the first
    group."""
    way, order = journey.ways[0], journey.tensors[1]
    size, device = way.group.size(), tokens_R.device
    to_R = torch.repeat_interleave(
        torch.arange(size, device=device), torch.tensor(way.sent, device=device), output_size=len(tokens_R)
    )
    keys = to_R * tokens + tokens_R
    if isinstance(tokens_R, FakeTensor):
        count = round(len(tokens_R) * share)
        sent = [count // size + (at < count % size) for at in range(size)]
        tokens_U, places_R = tokens_R.new_empty(count), torch.empty_like(tokens_R)
    else:
        keys_U, numbers_R = torch.unique(keys, return_inverse=True)  # sorted: by process, then by token
        tokens_U, processes_U = keys_U % tokens, keys_U // tokens
        counts = torch.bincount(processes_U, minlength=size)
        places_R = numbers_R - (counts.cumsum(0) - counts).index_select(0, to_R)
        sent = counts.tolist()
    come_R = _exchanged(places_R, way.received, way.sent, way.group)
    received = _distinct(come_R, way.received, share)
    starts = torch.tensor([sum(received[:at]) for at in range(size)], device=device)
    of_R = torch.repeat_interleave(starts, torch.tensor(way.received, device=device), output_size=len(come_R))
    copied_R = (come_R + of_R).index_select(0, order)
    found = Way(group=way.group, sent=sent, received=received)
    return Journey(ways=journey.ways, tensors=(*journey.tensors, tokens_U, copied_R), once=found)


def _distinct(come_R: torch.Tensor, received: Sequence[int], share: float) -> list[int]:
    """The number of distinct rows from each process: its positions are numbered without gaps."""
    if isinstance(come_R, FakeTensor):
        count, size = round(len(come_R) * share), len(received)
        return [count // size + (at < count % size) for at in range(size)]
    pieces: tuple[torch.Tensor, ...] = torch.split(come_R, list(received))
    most = torch.stack([piece.max() + 1 if len(piece) else piece.new_zeros(()) for piece in pieces])
    found: list[int] = most.tolist()
    return found


def kept_rows(counts: torch.Tensor, expected: float) -> int:
    """The sum of these counts; `expected` where it is unknown."""
    return round(expected) if isinstance(counts, FakeTensor) else int(counts.sum())


def _counts(sent_nE: torch.Tensor, experts: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The number of rows of each expert from each process. The message has space for all experts, whichever remain, so
    its size is known without the previous all-to-alls."""
    size, left = sent_nE.shape
    outgoing = sent_nE.new_zeros((size, experts // size))
    outgoing[:, :left] = sent_nE
    incoming = torch.empty_like(outgoing)
    waiting_for(dist.all_to_all_single, incoming, outgoing, group=group)
    return incoming[:, :left]


def _splits(counts_nE: torch.Tensor, total: int) -> list[int]:
    """The number of rows of each process; `total` divided evenly where it is unknown."""
    size = counts_nE.shape[0]
    if isinstance(counts_nE, FakeTensor):
        return [total // size + (at < total % size) for at in range(size)]
    found: list[int] = counts_nE.sum(1).tolist()
    return found


def _exchanged(rows: torch.Tensor, to: list[int], of: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    return _started(rows, to, of, group).land()


def _started(rows: torch.Tensor, to: list[int], of: list[int], group: dist.ProcessGroup) -> _Leg:
    sent, incoming = rows.contiguous(), rows.new_empty((sum(to), *rows.shape[1:]))
    work = dist.all_to_all_single(incoming, sent, to, of, group=group, async_op=True)
    return _Leg(work, group, sent, incoming)
