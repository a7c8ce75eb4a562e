"""Rows on their way to the devices of their experts, and back.

    rows sorted by expert ──all-to-all──> pieces of n devices, each sorted ──sort──> rows sorted by expert
                        counts of the experts go ahead, as nobody knows how many rows will come

Over several axes one after the other: after each the experts that are left are those of this device's coordinate, so
that rows which are sorted by expert are sorted by the next coordinate, too. Back the same ways in the opposite order.
Rows of experts that have a capacity are as many on every device, and no counts are sent.

A token may be sent `Once` to each process of the outermost group, with the places of its rows among what is sent:

    tokens ──index──> one row for each process that has any of its experts ──all-to-all──> ──index──> rows ──sort──> ...
    tokens <──sum─── one row from each of these <──all-to-all── sums of the rows of each token <──── rows <──sort── ...

Where tensors are fake nobody knows counts: then every device gets the same number of rows, times the imbalance, as the
prediction has it (see `runtime.auditing.imitation`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from planner.models.fp8_experts import unpacked_tokens
from runtime.waiting import Pending, waiting_for, waiting_for_work


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One all-to-all: rows that go to and come from each process of the group."""

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]


class _Leg:
    """One all-to-all under way. What is sent is held until it has arrived."""

    def __init__(self, work: Pending, group: dist.ProcessGroup, sent: torch.Tensor, incoming: torch.Tensor) -> None:
        self._work, self._group, self._sent, self._incoming = work, group, sent, incoming

    def land(self) -> torch.Tensor:
        """What has come."""
        waiting_for_work(self._work, self._group)
        incoming = self._incoming
        del self._sent, self._incoming
        return incoming


class UnderWay:
    """Rows on a way that takes one all-to-all last, or first, which has begun: `land` waits for it and takes them the
    `rest` of their way."""

    def __init__(self, leg: _Leg, rest: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self._leg, self._rest = leg, rest

    def land(self) -> torch.Tensor:
        """The rows at the end of their way."""
        come = self._leg.land()
        return come if self._rest is None else self._rest(come)


class Stayed:
    """Rows that have no way to go."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def land(self) -> torch.Tensor:
        """The rows."""
        return self._rows


class Unpacking:
    """Tokens on their way in 8 bits, with so many elements in the dtype of `like`."""

    def __init__(self, going: UnderWay | Stayed, hidden: int, like: torch.Tensor) -> None:
        self._going, self._hidden, self._like = going, hidden, like

    def land(self) -> torch.Tensor:
        """The rows as they are multiplied."""
        rows: torch.Tensor = unpacked_tokens(self._going.land(), self._hidden, self._like)
        return rows


Going: TypeAlias = UnderWay | Stayed | Unpacking


@dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """All ways of the rows of one call; none where rows stay. Its `tensors` are for autograd to keep: how many rows
    each expert of this device has, and for each way the order that sorts by expert what comes, and its inverse. Where
    tokens go `once` over the first way there are two more: the token of each row that is sent so, and which of those
    that come each row is a copy of, in the order of the experts."""

    ways: tuple[Way, ...]
    tensors: Sequence[torch.Tensor]
    once: Way | None = None

    @property
    def counts(self) -> torch.Tensor:
        return self.tensors[0]

    def there(self, rows: torch.Tensor) -> UnderWay | Stayed:
        """Rows of this device's tokens, sorted by expert, set out to be rows of this device's experts, sorted by
        expert. The first way is under way; others follow when that has landed."""
        if not self.ways:
            return Stayed(rows)
        way, order = self.ways[0], self.tensors[1]

        def rest(come: torch.Tensor) -> torch.Tensor:
            return self._later().all_there(come.index_select(0, order))

        return UnderWay(_started(rows, way.received, way.sent, way.group), rest)

    def all_there(self, rows: torch.Tensor) -> torch.Tensor:
        """The same, waited for."""
        return self.there(rows).land()

    def back(self, given: list[torch.Tensor]) -> Going:
        """The other way: the last of all that is under way is the first way of `there`. The rows are taken out of the
        list they are given in, so that in a caller that has no other name for them they go as soon as they are copied
        in the order in which they travel."""
        if not self.ways:
            return Stayed(given.pop())
        way, places = self.ways[0], self.tensors[2]
        rows = self._later().back(given).land().index_select(0, places)
        return UnderWay(_started(rows, way.sent, way.received, way.group))

    def tokens_there(self, x_NH: torch.Tensor) -> UnderWay | Stayed:
        """Tokens of this device, which go once to each process of the first way, to rows of this device's experts."""
        once = self.once
        assert once is not None, "rows go by themselves"
        tokens, copied = self.tensors[-2:]

        def rest(come: torch.Tensor) -> torch.Tensor:
            return self._later().all_there(come.index_select(0, copied))

        return UnderWay(_started(x_NH.index_select(0, tokens), once.received, once.sent, once.group), rest)

    def tokens_back(self, given: list[torch.Tensor], count: int) -> Going:
        """The sums of the rows of each of `count` tokens, first where the rows are, `count` H. Rows are given as to
        `back`."""
        once = self.once
        assert once is not None, "rows come back by themselves"
        tokens, copied = self.tensors[-2:]
        sums = _summed(self._later().back(given).land(), copied, sum(once.received))
        started = _started(sums, once.sent, once.received, once.group)
        return UnderWay(started, lambda come: _summed(come, tokens, count))

    def _later(self) -> "Journey":
        """All ways but the first."""
        further = self.tensors[3:] if self.once is None else self.tensors[3:-2]
        return Journey(ways=self.ways[1:], tensors=(self.tensors[0], *further))


def _summed(rows: torch.Tensor, to: torch.Tensor, count: int) -> torch.Tensor:
    """Rows added up where they go `to`, of `count` places; narrow ones in float32, as combining kernels do."""
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


def once(journey: Journey, tokens_R: torch.Tensor, tokens: int, share: float) -> Journey:
    """The same journey of rows, of which row r is of token `tokens_R[r]` of so many, with tokens that go once to each
    process of the first way. `share` of the rows are sent then where nobody knows. Collective over the first group."""
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
    """How many different rows come from each process: its places are numbered without gaps."""
    if isinstance(come_R, FakeTensor):
        count, size = round(len(come_R) * share), len(received)
        return [count // size + (at < count % size) for at in range(size)]
    pieces: tuple[torch.Tensor, ...] = torch.split(come_R, list(received))
    most = torch.stack([piece.max() + 1 if len(piece) else piece.new_zeros(()) for piece in pieces])
    found: list[int] = most.tolist()
    return found


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
    return _started(rows, to, of, group).land()


def _started(rows: torch.Tensor, to: list[int], of: list[int], group: dist.ProcessGroup) -> _Leg:
    sent, incoming = rows.contiguous(), rows.new_empty((sum(to), *rows.shape[1:]))
    work = dist.all_to_all_single(incoming, sent, to, of, group=group, async_op=True)
    return _Leg(work, group, sent, incoming)
