"""The numbers of a problem, arranged for an elimination schedule, and reduced as candidates are excluded.

    problem ── time_tables ──▶ one table per variable, then one per pair: parallel edges are summed, ends in order
            ── Tables.of ────▶ the same for time and memory, without forbidden candidates
    Tables  ── restrict ─────▶ Tables of the remaining candidates; `original` maps their choice to the problem

Memory is counted from the smallest entry of every table, so that a tight budget is not lost in rounding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.strategy_search.solvers.elimination.order import Schedule, schedule
from planner.strategy_search.solvers.problem import Array, Problem

Mask = NDArray[np.bool_]


def schedule_of(problem: Problem) -> Schedule:
    """The elimination schedule of a problem; the same structure gives the same object, from a cache."""
    return schedule(problem.sizes, tuple([(edge.first, edge.second) for edge in problem.edges]))


def time_tables(problem: Problem, plan: Schedule) -> list[Array]:
    """Times of all variables, then of all pairs."""
    nodes = [variable.time for variable in problem.variables]
    return nodes + _merged(plan, [edge.time for edge in problem.edges])


def memory_tables(problem: Problem, plan: Schedule) -> list[Array]:
    """Memory of all variables, then of all pairs."""
    nodes = [variable.memory for variable in problem.variables]
    return nodes + _merged(plan, [edge.memory for edge in problem.edges])


def _merged(plan: Schedule, edges: list[Array]) -> list[Array]:
    merged: list[Array | None] = [None] * len(plan.pairs)
    for (pair, flip), edge in zip(plan.edge_pairs, edges, strict=True):
        table = np.ascontiguousarray(edge.T) if flip else edge
        known = merged[pair]
        merged[pair] = table if known is None else known + table
    return [table for table in merged if table is not None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tables:
    """Times and memory of the remaining candidates; `base` is the sum subtracted from the memory tables."""

    plan: Schedule
    candidates: tuple[NDArray[np.intp], ...]
    time: tuple[Array, ...]
    memory: tuple[Array, ...]
    base: float
    transient: tuple[Array, ...]

    @classmethod
    def of(cls, problem: Problem, plan: Schedule) -> "Tables":
        """All candidates of a problem that are not forbidden."""
        memory = memory_tables(problem, plan)
        floors = [table.min().item() for table in memory]
        full = cls(
            plan=plan,
            candidates=tuple(np.arange(size) for size in problem.sizes),
            time=tuple(time_tables(problem, plan)),
            memory=tuple(table - floor for table, floor in zip(memory, floors, strict=True)),
            base=math.fsum(floors),
            transient=tuple(variable.transient for variable in problem.variables),
        )
        return full.restrict([np.isfinite(variable.time) for variable in problem.variables])

    def restrict(self, keep: Sequence[Mask]) -> "Tables":
        """Drop the candidates whose mask is False."""
        if all(mask.all() for mask in keep):
            return self
        chosen = [np.flatnonzero(mask) for mask in keep]
        count = len(keep)

        def cut(tables: tuple[Array, ...]) -> tuple[Array, ...]:
            nodes = [table[rows] for table, rows in zip(tables[:count], chosen, strict=True)]
            pairs = zip(tables[count:], self.plan.pairs, strict=True)
            return tuple(nodes + [table[chosen[first][:, None], chosen[second]] for table, (first, second) in pairs])

        return Tables(
            plan=self.plan,
            candidates=tuple(kept[rows] for kept, rows in zip(self.candidates, chosen, strict=True)),
            time=cut(self.time),
            memory=cut(self.memory),
            base=self.base,
            transient=tuple(values[rows] for values, rows in zip(self.transient, chosen, strict=True)),
        )

    def weighted(self, multiplier: float) -> list[Array]:
        """time + multiplier * memory, table by table."""
        if not multiplier:
            return list(self.time)
        return [time + multiplier * memory for time, memory in zip(self.time, self.memory, strict=True)]

    def allowed_memory(self) -> list[Array]:
        """The memory tables, infinite where the time is."""
        return [np.where(np.isfinite(t), m, math.inf) for t, m in zip(self.time, self.memory, strict=True)]

    def cost(self, choice: Sequence[int]) -> tuple[float, float]:
        """Time, and memory without `base`, of a choice among the remaining candidates."""
        cells: list[tuple[int, ...]] = [(k,) for k in choice]
        cells += [(choice[first], choice[second]) for first, second in self.plan.pairs]
        times = math.fsum([table.item(cell) for table, cell in zip(self.time, cells, strict=True)])
        return times, math.fsum([table.item(cell) for table, cell in zip(self.memory, cells, strict=True)])

    def largest_transient(self, choice: Sequence[int]) -> float:
        """The transient of a choice."""
        return max(values.item(k) for values, k in zip(self.transient, choice, strict=True))

    def original(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The same choice by the positions of candidates in the problem."""
        return tuple([kept.item(k) for kept, k in zip(self.candidates, choice, strict=True)])
