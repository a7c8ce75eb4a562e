"""Pipeline ranks on several kinds of devices: pieces priced for each kind, and the bounds that they prove together.

    kind       0    0    1    1         the kind of devices of a rank; there is one chain of pieces per kind
    rank       0 ── 1 ── 2 ── 3         the states of the boundary are the same for all

A stage of n blocks on a rank of kind k is busy for at least a_k + n b_k, for every (a, b) that the prices of that kind
prove (`planner.strategy_search.decomposition.lagrangian`). Within a time T, rank r can hold room_r(T) blocks, and more
in more time. So no division of the blocks makes all ranks faster than the pace: the least T in which all blocks fit.
The second part of a step is the time of one micro-batch on all ranks. It falls as more blocks stand on quick devices,
which may require a slower pace:

    step >= min over T >= pace of   T + lone(T)
            lone(T) = least sum of n_r c_k   with   n_r <= room_r(T),  sum n_r = N

c_k are the least seconds of a micro-batch in a block on kind k. lone falls with T, so between two times it is at least
its value at the later one: this bounds the minimum from below on a grid that is finest at the pace.

With one kind of devices `Multipliers.bounds` proves the same, and more if there are few micro-batches. Not good for:
virtual stages, which hold equal blocks on every rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hardware_profiles import Bytes
from planner.strategy_search.decomposition.chain import Chain
from planner.strategy_search.decomposition.lagrangian import Multipliers
from planner.strategy_search.decomposition.lines import Lines, pace
from planner.strategy_search.decomposition.priced import States, of_all_blocks
from planner.strategy_search.decomposition.setting import Setting

Array = NDArray[np.float64]

_GRID = (0.0, *(1e-7 * 1.5**step for step in range(44)))
"""Relative excess of the times of the grid over the pace, up to about four."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeterogeneousPipeline:
    """The pieces of a template for each kind of devices, the kind of each pipeline rank, and the bytes that may be used
    on a device of each kind. The chains differ in their prices only."""

    chains: tuple[Chain, ...]
    kinds: tuple[int, ...]
    capacities: tuple[float, ...]

    def __post_init__(self) -> None:
        first = self.chains[0]
        assert all((one.boundary, one.shape) == (first.boundary, first.shape) for one in self.chains)
        assert all(
            (one.blocks_in_head, one.blocks_in_tail) == (first.blocks_in_head, first.blocks_in_tail)
            for one in self.chains
        )

    @staticmethod
    def alike(chain: Chain, setting: Setting) -> "HeterogeneousPipeline":
        """A pipeline with the same devices on all ranks."""
        return HeterogeneousPipeline(chains=(chain,), kinds=(0,) * setting.ranks, capacities=(setting.capacity,))

    @property
    def chain(self) -> Chain:
        """The chain for whatever does not depend on the devices."""
        return self.chains[0]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of memory that the pieces take."""
        return sum(chain.nbytes for chain in self.chains)

    def chain_of(self, rank: int) -> Chain:
        """The pieces with the prices for the devices of a rank."""
        return self.chains[self.kinds[rank]]

    def setting_of(self, setting: Setting, rank: int) -> Setting:
        """The setting with the capacity of the devices of a rank."""
        return replace(setting, capacity=self.capacities[self.kinds[rank]])

    def with_room(self, room: Bytes) -> "HeterogeneousPipeline":
        """The same pipeline with `room` bytes of every device set aside."""
        return replace(self, capacities=tuple(capacity - room for capacity in self.capacities)) if room else self

    def blocks_of(self, setting: Setting) -> tuple[int, float]:
        """`Setting.most` and `Setting.holds` for the devices with the most memory."""
        roomiest = replace(setting, capacity=max(self.capacities))
        return roomiest.most(self.chain), roomiest.holds(self.chain)

    def ranks_of(self, kind: int) -> tuple[int, ...]:
        """The ranks on a kind of devices."""
        return tuple(rank for rank, own in enumerate(self.kinds) if own == kind)


def step_bounds(
    pipeline_of_kinds: HeterogeneousPipeline,
    multipliers: Sequence[Multipliers],
    setting: Setting,
    some: States | None = None,
    limit: float = math.inf,
) -> Array:
    """Lower bounds on the step seconds for every state of the boundary, or for those of `some`, from the multipliers of
    every kind. A bound that reaches `limit` may be lower than the best provable one."""
    if len(multipliers) == 1:
        return multipliers[0].bounds(setting, some, limit)
    found = _Mixed(pipeline_of_kinds, multipliers, setting).bounds()
    return found if some is None else found[some]


class _Mixed:
    """The bounds that several kinds of devices prove together."""

    def __init__(
        self, pipeline_of_kinds: HeterogeneousPipeline, multipliers: Sequence[Multipliers], setting: Setting
    ) -> None:
        assert setting.chunks == 1
        self.pipeline_of_kinds, self.multipliers = pipeline_of_kinds, multipliers
        self.settings = [replace(setting, capacity=capacity) for capacity in pipeline_of_kinds.capacities]
        self.alone = [one.alone().values for one in multipliers]  # head, inner (kinds of blocks, *states), tail
        first, last = pipeline_of_kinds.kinds[0], pipeline_of_kinds.kinds[-1]
        crossings = multipliers[0].crossings(setting)
        self.ends: Array = self.alone[first][0] + self.alone[last][2] + crossings
        self.possible: NDArray[np.bool_] = np.isfinite(self.ends)
        for _, inner, _ in self.alone:
            self.possible &= np.isfinite(inner).all(axis=0)

    def bounds(self) -> Array:
        best = np.zeros(self.possible.shape)
        for units in [found for one in self.multipliers for found in one.rank_bounds.units(self.possible)]:
            best = np.maximum(best, self._in_units(units))
        return np.where(self.possible, best, math.inf)

    def _in_units(self, units: Array) -> Array:
        """The bounds with blocks measured in some units. Clears `self.possible` for states in which the blocks do not
        fit."""
        total = of_all_blocks(self.multipliers[0].counts, units)
        lines = [
            one.rank_bounds.lines(setting, self.possible, units, self.pipeline_of_kinds.ranks_of(kind))
            for kind, (one, setting) in enumerate(zip(self.multipliers, self.settings, strict=True))
        ]
        every = [line for own in lines for line in own]
        self.possible &= np.min([line.room for line in every], axis=0) >= 0
        room = sum(np.maximum(line.room, 0.0) * line.ranks for line in every)
        self.possible &= room >= total * (1 - 1e-12)
        share = 1 / len(self.pipeline_of_kinds.kinds)
        equal: Array = np.max([line.busy(share) for line in every], axis=0)
        least = pace(every, equal, total, self.multipliers[0].halvings)
        times = np.array([least * (1 + more) for more in _GRID])
        found: Array = (times + self._lone(lines, units, total, times[1:])).min(axis=0)
        return found

    def _lone(self, lines: Sequence[Sequence[Lines]], units: Array, total: Array, times: Array) -> Array:
        """Least seconds of one micro-batch on all ranks if no rank is busy for longer than each of the times, and in
        the last row without such a limit, (times + 1, *states); infinite where not all blocks fit."""
        costs = np.array(
            [
                np.where(self.possible, (inner / units).min(axis=0), 0.0) if len(inner) else total * 0.0
                for _, inner, _ in self.alone
            ]
        )
        rooms = np.array([sum((self._rooms(line, times) for line in own), total * 0.0) for own in lines])
        seconds = np.where(self.possible, self.ends, 0.0) + np.zeros((len(times) + 1, *self.possible.shape))
        left = total + np.zeros_like(seconds)
        for place in costs.argsort(axis=0, kind="stable"):
            here = np.minimum(left, np.take_along_axis(rooms, place[None, None], axis=0)[0])
            seconds = seconds + here * np.take_along_axis(costs, place[None], axis=0)[0]
            left = left - here
        found: Array = np.where(left > total * 1e-9, math.inf, seconds)
        return found

    def _rooms(self, line: Lines, times: Array) -> Array:
        """Units that the ranks of a line can hold within each of the times, and in the last row in any time."""
        most = np.minimum(line.room, line.rounded(line.within(times[:, None])))
        room: Array = np.maximum(np.concatenate([most, line.room[None]]), 0.0) * line.ranks
        return room
