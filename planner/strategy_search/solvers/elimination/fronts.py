"""Exact elimination with a budget: messages are Pareto fronts of (time, memory) instead of single numbers.

    bucket of v:   cells (v, s) ── join the front of each child ──▶ partial choices of the subtree
                                ── instead of a minimum over v: per s, keep all that no other beats in time and memory

Alone this explodes. Two bounds keep it small (potential.py): a partial choice at the cell c survives only if

    bound(c) + the excess of its children over their cheapest  ≤  cutoff + λ budget
    need(c)  + the excess of its children over their leanest   ≤  budget

With λ at the maximum of the Lagrangian, the survivors are the partial choices within the duality gap: the "core" of the
problem. It is small in practice, but exponential in the worst case (it contains the knapsack problem). If a front
exceeds `width`, its entries with the largest bounds are dropped, and the smallest dropped bound is recorded: nothing
faster than that was lost. So a choice found below it is still optimal; otherwise that bound is what the result proves.

Elimination with sets of incomparable values: Bistarelli, Montanari, Rossi, Semiring-based constraint satisfaction and
optimization (1997); labels under a resource limit: Desrochers and Soumis 1988. Not good for many near-ties whose bytes
have no common measure: there the width takes effect.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.strategy_search.solvers.elimination.messages import totals
from planner.strategy_search.solvers.elimination.order import Bucket, Input, Schedule
from planner.strategy_search.solvers.elimination.potential import Fixed
from planner.strategy_search.solvers.problem import Array

Integers = NDArray[np.intp]

# A join may make this many times the width of a front before it is thinned.
JOIN_FACTOR = 4

# Entries whose times differ by less than this, relative to the size of all times, count as equal in time.
RESOLUTION = 1e-13


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The fastest choice found, if any; the proved bound on all others below the cutoff; the size of the largest
    front."""

    choice: list[int] | None
    bound: float
    largest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Partials:
    """Partial choices of a bucket before its variable is eliminated, one entry each.

    `cell` is an index into `coordinates`, one array per axis of the clique. `bound` and `need` are those of the whole
    choice. `links` has, for each child joined so far, the entry of its front.
    """

    coordinates: tuple[Integers, ...]
    cell: Integers
    time: Array
    memory: Array
    bound: Array
    need: Array
    links: tuple[Integers, ...]

    def take(self, rows: Integers) -> "Partials":
        """The entries at these rows."""
        return Partials(
            coordinates=self.coordinates,
            cell=self.cell[rows],
            time=self.time[rows],
            memory=self.memory[rows],
            bound=self.bound[rows],
            need=self.need[rows],
            links=tuple(link[rows] for link in self.links),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """A message: its entries sorted by state of the scope, then by excess.

    `excess` is the distance of an entry from the cheapest one of its state at the multiplier, `extra` from the leanest
    one. `value` is the candidate of the eliminated variable; `starts` says where the entries of each state begin.
    """

    shape: tuple[int, ...]
    starts: Integers
    state: Integers
    time: Array
    memory: Array
    excess: Array
    extra: Array
    value: Integers
    links: tuple[Integers, ...]


def search_fronts(fixed: Fixed, *, cutoff: float, width: int) -> Found:
    """The fastest choice below the cutoff and within the budget, as far as fronts of this width can tell."""
    sweep = _Sweep(fixed, cutoff, width)
    fronts: list[Front] = []
    for step, bucket in enumerate(fixed.tables.plan.buckets):
        partials = sweep.cells(step, bucket)
        for child, source in zip(bucket.children, bucket.child_inputs, strict=True):
            partials = sweep.join(partials, fronts[child], source)
        fronts.append(sweep.project(step, partials))
        if not fronts[-1].time.size:
            return Found(choice=None, bound=sweep.proved(), largest=sweep.largest)
    choice = _trace(fixed.tables.plan, fronts)
    return Found(choice=choice, bound=sweep.proved(), largest=sweep.largest)


class _Sweep:
    """One pass over the buckets; `threshold` is lowered whenever a front has to be thinned."""

    def __init__(self, fixed: Fixed, cutoff: float, width: int) -> None:
        self.fixed, self.cutoff, self.width = fixed, cutoff, width
        self.threshold = fixed.limits.price(cutoff)
        self.lost = math.inf
        self.largest = 0
        self.quantum = RESOLUTION * abs(cutoff)
        self.offset = len(fixed.tables.time)

    def proved(self) -> float:
        """A lower bound on all choices that were not examined."""
        return min(self.cutoff, self.lost - self.fixed.limits.price(0.0))

    def cells(self, step: int, bucket: Bucket) -> Partials:
        """The cells of the clique table that satisfy both bounds, with the sum of the bucket's own tables."""
        fixed = self.fixed
        bounds = totals(bucket, fixed.bound.tables, fixed.bound.down[step])
        needs = totals(bucket, fixed.need.tables, fixed.need.down[step])
        found: list[tuple[Integers, ...]] = []
        kept_bounds, kept_needs = [], []
        for (rows, bound), (_, need) in zip(bounds, needs, strict=True):
            alive = (bound <= self.threshold) & (need <= fixed.limits.budget)
            first, *others = np.nonzero(alive)
            found.append((first + rows.start, *others))
            kept_bounds.append(bound[alive])
            kept_needs.append(need[alive])
        coordinates = tuple(np.concatenate(axis) for axis in zip(*found, strict=True))
        partials = Partials(
            coordinates=coordinates,
            cell=np.arange(coordinates[0].size),
            time=_gather(fixed.tables.time, bucket.inputs, coordinates),
            memory=_gather(fixed.tables.memory, bucket.inputs, coordinates),
            bound=np.concatenate(kept_bounds),
            need=np.concatenate(kept_needs),
            links=(),
        )
        return self.thin(partials, JOIN_FACTOR * self.width)

    def join(self, partials: Partials, front: Front, source: Input) -> Partials:
        """Every entry with every entry of the child's front at its state, as far as the bounds allow."""
        states = _states(
            [partials.coordinates[axis] for axis in source.axes], front.shape, partials.coordinates[0].size
        )
        key = states[partials.cell]
        begin = front.starts[key]
        count = self._matches(partials, front, key, begin)
        rows = np.repeat(np.arange(count.size), count)
        entries = np.arange(rows.size) - np.repeat(np.cumsum(count) - count - begin, count)
        bound = partials.bound[rows] + front.excess[entries]
        need = partials.need[rows] + front.extra[entries]
        alive = np.flatnonzero((bound <= self.threshold) & (need <= self.fixed.limits.budget))
        rows, entries = rows[alive], entries[alive]
        joined = Partials(
            coordinates=partials.coordinates,
            cell=partials.cell[rows],
            time=partials.time[rows] + front.time[entries],
            memory=partials.memory[rows] + front.memory[entries],
            bound=bound[alive],
            need=need[alive],
            links=(*(link[rows] for link in partials.links), entries),
        )
        best = joined.take(undominated(joined.cell, joined.time, joined.memory, self.quantum))
        return self.thin(best, JOIN_FACTOR * self.width)

    def _matches(self, partials: Partials, front: Front, key: Integers, begin: Integers) -> Integers:
        """For each entry, the number of leading entries of the front at its state to join. Lowers the threshold if
        there are too many in all.

        Within a state the front is sorted by excess, so these are the entries with excess ≤ room.
        """
        scale = max((self.threshold - partials.bound).max(initial=0.0), 1e-300)
        rank = front.state + 0.5 * np.minimum(front.excess / scale, 1.0)

        def count(threshold: float) -> Integers:
            room = np.clip((threshold - partials.bound) / scale, 0.0, 1.0)
            matches = np.searchsorted(rank, key + 0.5 * room + 1e-6, side="right") - begin
            return np.where(partials.bound <= threshold, matches, 0)

        most = 2 * JOIN_FACTOR * self.width
        matches = count(self.threshold)
        if matches.sum() <= most:
            return matches
        low, high = self.threshold - scale, self.threshold
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if count(middle).sum() <= most else (low, middle)
        self.threshold = low
        self.lost = min(self.lost, low)
        matches = count(low)
        if matches.sum() > most:  # even the ties of the least bound are too many: keep the first ones
            self.lost = min(self.lost, partials.bound.min().item())
            matches = np.minimum(matches, np.maximum(0, most - (np.cumsum(matches) - matches)))
        return matches

    def project(self, step: int, partials: Partials) -> Front:
        """Eliminate the variable: for each state of the scope, keep the entries that none beats in time and memory."""
        plan, fixed = self.fixed.tables.plan, self.fixed
        message = fixed.bound.tables[self.offset + step]
        leanest = fixed.need.tables[self.offset + step]
        states = _states(partials.coordinates[1:], message.shape, partials.coordinates[0].size)
        state = states[partials.cell]
        best = undominated(state, partials.time, partials.memory, self.quantum)
        partials = self.thin(partials.take(best), self.width)
        self.largest = max(self.largest, partials.time.size)
        state = states[partials.cell]
        cost = partials.time + fixed.limits.multiplier * partials.memory
        excess = np.maximum(cost - message.ravel()[state], 0.0)
        order = np.lexsort((excess, state))
        state, partials = state[order], partials.take(order)
        assert len(plan.buckets[step].scope) == len(message.shape)
        return Front(
            shape=message.shape,
            starts=np.searchsorted(state, np.arange(message.size)),
            state=state,
            time=partials.time,
            memory=partials.memory,
            excess=excess[order],
            extra=np.maximum(partials.memory - leanest.ravel()[state], 0.0),
            value=partials.coordinates[0][partials.cell],
            links=partials.links,
        )

    def thin(self, partials: Partials, most: int) -> Partials:
        """Keep at most `most` entries, those with the least bounds, and record the least bound that was dropped."""
        if partials.bound.size <= most:
            return partials
        order = np.argsort(partials.bound, kind="stable")
        self.threshold = min(self.threshold, partials.bound.item(order.item(most)))
        self.lost = min(self.lost, self.threshold)
        return partials.take(np.sort(order[:most]))


def undominated(group: Integers, time: Array, memory: Array, quantum: float) -> Integers:
    """Rows that no other row of their group beats: none has less memory, or equal memory, and at most the same time, up
    to a quantum.

    Sorted by group, then memory, a row survives if it is faster than all rows before it in its group. The running
    minimum restarts with each group, because the times of every group are shifted below those of the previous group.
    """
    if not group.size:
        return np.zeros(0, dtype=np.intp)
    order = np.lexsort((time, memory, group))
    ordered = group[order]
    number = np.concatenate([[0], np.cumsum(ordered[1:] != ordered[:-1])])
    late = time[order] - time.min()
    spread = late.max().item()
    quantum = max(quantum, spread * (int(number[-1]) + 1) * 2.0**-61, 1e-300)  # shifted ticks stay within 64 bits
    ticks = np.floor(late / quantum).astype(np.int64)
    ticks -= number * (int(ticks.max()) + 1)
    running = np.minimum.accumulate(ticks)
    faster = np.concatenate([[True], ticks[1:] < running[:-1]])
    survivors: Integers = order[faster]
    return survivors


def _gather(tables: Sequence[Array], inputs: tuple[Input, ...], coordinates: tuple[Integers, ...]) -> Array:
    """The sum of a bucket's own tables at these cells."""
    total = np.zeros(coordinates[0].size)
    for source in inputs:
        total = total + tables[source.table][tuple(coordinates[axis] for axis in source.axes)]
    return total


def _states(coordinates: Sequence[Integers], shape: tuple[int, ...], cells: int) -> Integers:
    """The position of each cell in the raveled scope; 0 for an empty scope."""
    if not shape:
        return np.zeros(cells, dtype=np.intp)
    return np.asarray(np.ravel_multi_index(tuple(coordinates), shape), dtype=np.intp)


def _trace(plan: Schedule, fronts: list[Front]) -> list[int]:
    """The choice behind the fastest entry of the last front."""
    buckets, choice = plan.buckets, [0] * plan.variables
    entries = [0] * len(buckets)
    entries[-1] = int(fronts[-1].time.argmin())
    for step in range(len(buckets) - 1, -1, -1):
        bucket, front = buckets[step], fronts[step]
        choice[bucket.variable] = front.value.item(entries[step])
        for child, link in zip(bucket.children, front.links, strict=True):
            entries[child] = link.item(entries[step])
    return choice
