"""Seconds of head, blocks and tail, and the lower bound that whole blocks give on the ranks of a pipeline.

    rank 0            rank 1 ... p-2          rank p-1
    head + n blocks   n blocks                n blocks + tail         n whole, 1 at least; all blocks in all

The slowest rank has M seconds or more:

    mean      the seconds of all over p
    ends      head and one block, or tail and one block; with equal ranks as many blocks as each holds
    whole     the lowest T for which (p - 2) floor(T / b) + floor((T - head) / b) + floor((T - tail) / b) covers all
              blocks that take b, or all blocks where b is what the quickest takes

With v stages on each rank, and m micro-batches over which these seconds are divided, a step takes

    (m - 1/v) max t + sum t / v  >=  p M (1 - 1 / (v m)) + p mean p / (v m)

(costmodels.pipelines.schedules), because ranks also divide the devices: a rank takes p times its seconds on all
devices.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from planner.strategy_search.decomposition.chain import Chain
from planner.strategy_search.request.space import Configuration

Array = NDArray[np.float64]

_ROUNDED_BYTES = 1e-6
"""Share of a device's memory by which sums of the same bytes in another order differ at most."""

_ROUNDING = 1e-9
"""Share of a block by which a sum may miss a whole block: sums of the same numbers in another order differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTimes:
    """Seconds of the experts of a block, spread over all devices: forward and backward `once`, with a second forward
    pass if they are recomputed (`again`), and for the collectives of their weights with every micro-batch (`moved`)."""

    once: float
    again: float
    moved: float


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockTimes:
    """Seconds of a batch with all devices in one stage, at every state of the boundary: of the head and of the tail,
    (states), and of one block of each kind, (kinds, states). `counts` gives the blocks of each kind, without those in
    the head and in the tail. `places` has the operators that do not count yet, by the kind of their block: -1 for the
    head, -2 for the tail. `live` has the least bytes that a device keeps of one block of each kind until its backward
    pass, (kinds, states), and `ending` what the last block keeps less, if that is known; `more` are extra seconds of
    all blocks together."""

    head: Array
    blocks: Array
    tail: Array
    counts: tuple[int, ...]
    in_head: int
    in_tail: int
    places: Mapping[int, tuple[int, ...]]
    live: Array | None = None
    ending: Array | float = 0.0
    more: Array | float = 0.0
    known: dict[tuple[int, bool], tuple[Array, Array]] = field(default_factory=dict)

    def times(self, factor: float) -> "BlockTimes":
        """The block times, multiplied by a factor."""
        return replace(
            self,
            head=self.head * factor,
            blocks=self.blocks * factor,
            tail=self.tail * factor,
            live=None if self.live is None else self.live * factor,
            ending=self.ending * factor,
            known={},
        )

    def within(self, room: float, again: "BlockTimes | None") -> "BlockTimes":
        """With the extra seconds of recomputing as many blocks as needed so that all keep at most `room` bytes: blocks
        that are run `again` take and keep what they do there. Fractions of blocks count, those first that save most
        bytes per second. Infinitely long if nothing is enough, or if there is no other way to run blocks."""
        assert self.live is not None
        counts = np.array(self.counts)[:, None]
        excess = (counts * self.live).sum(axis=0) + self.ending - room
        if again is None:
            return replace(self, more=np.where(excess > _ROUNDED_BYTES * room, math.inf, 0.0), known={})
        assert again.live is not None
        saved = counts * np.maximum(self.live - again.live, 0.0)
        taken = np.where(saved > 0, counts * np.maximum(again.blocks - self.blocks, 0.0), 0.0)
        order = np.argsort(taken / np.maximum(saved, 1.0), axis=0, kind="stable")
        saved, taken = (np.take_along_axis(values, order, axis=0) for values in (saved, taken))
        before = np.cumsum(saved, axis=0) - saved
        shares = np.clip((excess - before) / np.maximum(saved, 1.0), 0.0, 1.0)
        possible = excess <= saved.sum(axis=0) + _ROUNDED_BYTES * room
        return replace(self, more=np.where(possible, (shares * taken).sum(axis=0), math.inf), known={})

    def with_experts(self, seconds: Mapping[int, float]) -> "BlockTimes":
        """With the seconds of operators added in each block that has them."""
        head, tail, more = 0.0, 0.0, [0.0] * len(self.counts)
        for at, own in seconds.items():
            for place in self.places.get(at, ()):
                if place == _HEAD:
                    head += own
                elif place == _TAIL:
                    tail += own
                else:
                    more[place] += own
        blocks = self.blocks + np.array(more)[:, None]
        return replace(self, head=self.head + head, tail=self.tail + tail, blocks=blocks, known={})

    def step_seconds(self, members: Sequence[Configuration]) -> float:
        """A lower bound on the step time of configurations that differ only in their micro-batches and virtual
        stages."""
        found = math.inf
        for c in members:
            slowest, mean = self._on_ranks(c.pipeline, c.virtual_stages > 1 and not c.uneven)
            possible = np.isfinite(mean)
            if not possible.any():
                continue
            slowest, mean = slowest[possible], mean[possible]
            filling = (c.pipeline * mean - slowest) / (c.virtual_stages * c.micro_batches)
            found = min(found, c.pipeline * float((slowest + filling).min()))
        return found

    def _on_ranks(self, ranks: int, equal: bool) -> tuple[Array, Array]:
        """Lower bounds on the seconds of the slowest rank, and of the average rank."""
        if (ranks, equal) not in self.known:
            mean = self._mean(ranks)
            self.known[ranks, equal] = self._slowest(ranks, mean, equal), mean
        return self.known[ranks, equal]

    def _mean(self, ranks: int) -> Array:
        blocks = [count * own for count, own in zip(self.counts, self.blocks, strict=True)]
        whole: Array = self.head + self.tail + self.more + sum(blocks, np.zeros(self.head.shape))
        return whole / ranks

    def _slowest(self, ranks: int, mean: Array, equal: bool) -> Array:
        """A lower bound on the seconds of the slowest rank, if ranks hold equally many blocks, or whole ones."""
        total = sum(self.counts)
        if ranks == 1 or not total:
            return mean
        quickest: Array = np.min([own for own, count in zip(self.blocks, self.counts, strict=True) if count], axis=0)
        least = total / ranks if equal else 1
        ends = (self.head + (least - self.in_head) * quickest, self.tail + (least - self.in_tail) * quickest)
        found: Array = np.maximum.reduce([mean, *ends])
        rows = [(total, quickest)]
        if len(self.counts) > 1:
            rows += [(count, own) for count, own in zip(self.counts, self.blocks, strict=True) if count]
        for count, own in rows:
            found = np.maximum(found, self._whole(ranks, count, np.maximum(own, 1e-30)))
        return found

    def _whole(self, ranks: int, count: int, own: Array) -> Array:
        """The least seconds in which ranks can hold `count` whole blocks that take `own` each."""
        head, tail = self.head / own, self.tail / own
        least = (count + head + tail) / ranks
        best = np.full(least.shape, math.inf)
        for part in (np.zeros(least.shape), head % 1, tail % 1):
            first = np.ceil(least - part - _ROUNDING)
            for more in range(3):
                time = first + more + part
                rooms = (ranks - _ENDS) * np.floor(time + _ROUNDING)
                for end in (head, tail):
                    rooms = rooms + np.floor(time - end + _ROUNDING)
                best = np.where((rooms >= count) & (time < best), time, best)
        return np.where(np.isfinite(best), best, least) * own * (1 - _ROUNDING)


_HEAD, _TAIL, _ENDS = -1, -2, 2


def block_times(
    chain: Chain, states: Array, values: tuple[Array, Array, Array], live: Array | None = None
) -> BlockTimes:
    """The block times from the values of head, inner blocks (kinds, states) and tail, and the bytes that these keep,
    for the states that are possible."""
    possible = np.isfinite(states).reshape(-1)
    head, tail = (np.broadcast_to(one, chain.shape).reshape(-1)[possible] for one in (values[0], values[2]))
    inner = values[1].reshape(len(values[1]), -1)[:, possible]
    places: dict[int, list[int]] = {}
    sides = [(_HEAD, chain.head), (_TAIL, chain.tail), *enumerate(chain.kinds)]
    for place, pieces in sides:
        for key in dict.fromkeys(key for piece in pieces for key in piece.keys if isinstance(key, int)):
            places.setdefault(key, []).append(place)
    return BlockTimes(
        head=head,
        blocks=inner,
        tail=tail,
        counts=chain.block_ranges.totals,
        in_head=chain.blocks_in_head,
        in_tail=chain.blocks_in_tail,
        places={key: tuple(own) for key, own in places.items()},
        live=None if live is None else live.reshape(len(live), -1)[:, possible],
        ending=np.minimum(np.broadcast_to(chain.ending, chain.shape).reshape(-1)[possible], 0.0),
    )
