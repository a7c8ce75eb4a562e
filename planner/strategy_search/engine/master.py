"""The master program: prices of memory and shares of exposed communication, all at once, from the known columns.

A rank with n_k inner blocks of kind k runs columns j in x_j blocks each, where x_j may be a fraction (Dantzig and Wolfe
1960):

    min   sum x_j (w part_j + step_j - reduction_j + uncovered_j) + w (f + b) + l
    with  sum over the columns of a piece x_j = its number on the rank           (head and tail: 1)
          sum x_j bytes_j + interior <= capacity                                 price of memory, two rows
          sum x_j hosted_j <= host                                               price of the host's memory
          sum x_j (forward excess_j - forward uncovered_j / w)  <= f              share of the forward pass
          sum x_j (backward excess_j - backward uncovered_j / w) <= b             share of the backward pass
          sum x_j (reduction_j - c backward_j) - c b <= l                         share of the last backward pass

The interior, the memory that is used only for a moment, is a maximum over blocks. It is at least the average over the
most blocks that a rank may hold, plus the least that an operator needs. It is also at least what the tail has of both.
Each of the two gives a row.

The dual values are the prices and shares at which the bound from all known columns is highest (`lagrangian`), so the
pieces are solved for them next. That gives either a new column, or the proof that no bound is higher. If memory alone
binds, the price is the one at which two columns cost the same. If several of the up to four numbers matter, they cannot
be found that way one after the other.

GLOP solves the program, some rows and at most a hundred columns, in a millisecond. Not good for: problems in which
nothing fits, of which the program says nothing; the leanest columns come first then.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.strategy_search.decomposition.lagrangian import Multipliers
from planner.strategy_search.decomposition.mixture import Shares
from planner.strategy_search.decomposition.pieces import Column, Passes, Solved
from planner.strategy_search.decomposition.priced import State
from planner.strategy_search.decomposition.setting import Setting
from planner.strategy_search.solvers.linear_program import LinearSolution, minimized

_TRAVELS = 3
"""Number of passes whose work overlaps communication; each has a row."""

_NONE = 1e-9
"""Fewer blocks than this count as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Master:
    """The optimum over all known columns: `price`, in seconds of a step per byte of memory; `under`, the shares of
    exposed communication; `at_tail`, the share of the interior as the tail has it; `hosted`, the price of the host's
    memory; the `seconds` of the rank; and `shares`, the columns of each kind of block with the number of blocks that
    run each."""

    price: float
    under: Passes
    at_tail: float
    hosted: float
    seconds: float
    shares: Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """`count` columns that a rank takes in all, with micro-batches in flight; `shares`: whether a share of their
    interior counts."""

    count: int
    flights: float
    columns: tuple[Column, ...]
    shares: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """A row of memory: the capacity for what stays, and either a share of the interior of every column, or all the
    memory that the columns of one group use for a moment; or one of the host's memory."""

    capacity: float
    interior: float = 0.0
    interior_of: int | None = None
    of_host: bool = False


def master_of(
    multipliers: Multipliers,
    setting: Setting,
    state: State,
    rank: int,
    counts: Sequence[int],
    at_once: float | None = None,
) -> Master | None:
    """The master of a rank with `counts` inner blocks of each kind in every chunk; None if no mixture of the known
    columns fits. `setting` has the capacity of the rank's devices. Memory that is used for a moment counts as in the
    bound, or as `at_once` bytes."""
    first, last, chain = rank == 0, rank == setting.ranks - 1, multipliers.chain
    flights, priced = setting.flights(rank), multipliers.priced

    def distinct(pieces: Sequence[tuple[Solved, ...]]) -> tuple[Column, ...]:
        known = [one.columns(own, state, chain) for one, own in zip(priced, pieces, strict=True)]
        return tuple({c.amounts: c for c in itertools.chain.from_iterable(known)}.values())

    together = setting.together(rank) if setting.unlike(chain) else [(setting.copies, flights)]
    groups = list[_Group]()
    for kind, count in enumerate(counts):
        columns = distinct([one.inner[kind] for one in priced])
        groups += [_Group(count=count * chunks, flights=own, columns=columns, shares=True) for chunks, own in together]
    inner = len(groups)
    if first:
        columns = distinct([one.head for one in priced])
        groups.append(_Group(count=1, flights=flights, columns=columns, shares=chain.interior_in_head))
    if last and chain.tail:
        columns, shares = distinct([one.tail for one in priced]), chain.blocks_in_tail > 0
        groups.append(_Group(count=1, flights=min(flights, 1.0), columns=columns, shares=shares))
    if at_once is None:
        least = multipliers.rank_bounds.least_transient(first, last, inner=not setting.may_hold_none(chain, rank))
        memory = [
            _Memory(
                capacity=setting.capacity - least,
                interior=multipliers.questions.interior,
            )
        ]
        if last and chain.tail:
            memory.append(_Memory(capacity=setting.capacity, interior_of=len(groups) - 1))
    else:
        memory = [_Memory(capacity=setting.capacity - at_once)]
    if setting.host < math.inf:
        memory.append(_Memory(capacity=setting.host, of_host=True))
    found = _solved(groups, memory, multipliers) if min(row.capacity for row in memory) > 0 else None
    if found is None:
        return None
    solution, taken = found
    price, *rest = (dual / row.capacity for dual, row in zip(_duals(solution), memory, strict=False))
    hosted = rest.pop() if memory[-1].of_host else 0.0
    total = price + sum(rest)
    waits = _duals(solution)[len(memory) : len(memory) + _TRAVELS]
    late = min(1.0, waits[2])
    costs = (multipliers.weight, multipliers.weight - late * _lengthens(multipliers))
    there, back = (min(1.0, dual / cost) if cost > 0 else 0.0 for dual, cost in zip(waits, costs, strict=False))
    return Master(
        price=_rounded(total),
        under=(_rounded(there), _rounded(back), _rounded(late)),
        at_tail=_rounded(sum(rest) / total) if total else 0.0,
        hosted=_rounded(hosted),
        seconds=solution.value,
        shares=[
            [
                (column, blocks / setting.copies)
                for own in taken[first : first + len(together)]
                for column, blocks in own
                if blocks > _NONE
            ]
            for first in range(0, inner, len(together))
        ],
    )


def _duals(solution: LinearSolution) -> list[float]:
    """The dual value of every row; memory and exposed communication are limited from above."""
    found: list[float] = np.maximum(-solution.duals, 0.0).tolist()
    return found


def _lengthens(multipliers: Multipliers) -> float:
    """Share of a backward pass's exposed communication during which it overlaps further reductions."""
    return multipliers.questions.covers if multipliers.single else 0.0


def _solved(
    groups: Sequence[_Group], memory: Sequence[_Memory], multipliers: Multipliers
) -> tuple[LinearSolution, list[list[tuple[Column, float]]]] | None:
    """Solves the program, whose rows are those of memory, of exposed communication, and of the numbers of columns.
    Returns the solution and how often each column of every group is taken; None if none fits."""
    columns = [(number, group, c) for number, group in enumerate(groups) for c in group.columns]
    limits, weight, covers = len(memory) + _TRAVELS, multipliers.weight, multipliers.questions.covers
    rows = np.zeros((limits + len(groups), _TRAVELS + len(columns)))
    costs = np.zeros(rows.shape[1])
    costs[:_TRAVELS] = weight, weight, 1.0
    rows[len(memory) : limits, :_TRAVELS] = -np.eye(_TRAVELS)
    rows[limits - 1, 1] = -_lengthens(multipliers)
    for at, (number, group, column) in enumerate(columns, _TRAVELS):
        a = column.amounts
        uncovered = a.uncovered_forward, a.uncovered_backward
        once = min(1.0, weight) * sum(uncovered)  # communication that takes longer than the work includes it
        costs[at] = weight * a.part + a.step - a.reduction + once
        there, back = (seconds * min(1.0, 1 / weight) if weight else 0.0 for seconds in uncovered)
        for row, own in enumerate(memory):
            if own.of_host:
                rows[row, at] = (a.hosted + group.flights * a.hosted_live) / own.capacity
                continue
            held = a.replay + a.transient if number == own.interior_of else own.interior * group.shares * a.replay
            rows[row, at] = (a.fixed + group.flights * a.live + held) / own.capacity
        rows[len(memory) : limits, at] = (
            a.excess_forward - there,
            a.excess_backward - back,
            a.reduction - covers * a.backward,
        )
        rows[limits + number, at] = 1.0
    numbers = [float(group.count) for group in groups]
    lower = np.array([-np.inf] * limits + numbers)
    solution = minimized(costs, rows, lower, np.array([1.0] * len(memory) + [0.0] * _TRAVELS + numbers))
    if solution is None:
        return None
    taken = list[list[tuple[Column, float]]]([] for _ in groups)
    for (number, _, column), blocks in zip(columns, solution.columns[_TRAVELS:].tolist(), strict=True):
        taken[number].append((column, blocks))
    return solution, taken


def _rounded(dual: float) -> float:
    """A dual value, rounded: the last digits of a linear program do not matter."""
    return float(f"{dual:.4g}")
