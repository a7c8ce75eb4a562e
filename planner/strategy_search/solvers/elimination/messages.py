"""Min-sum bucket elimination: the cheapest choice of a problem whose tables are plain sums.

Every table is put in the bucket of the first of its variables to be eliminated. A bucket sums its tables over its
clique (the variable v and its neighbours s at that moment), takes the minimum over v, and sends the result on as a new
table:

    a ── b ── c        up     C_v(v, s) = tables of the bucket + messages that arrived
    │    │    │               m_v(s)    = min over v of C_v(v, s)
    d ── e ── f        back   v = argmin of C_v(., s) once s is known, last bucket first
                       down   D_v(s)    = the cheapest of everything outside the subtree of v, given s
                                        = min over the rest of the parent's clique of (C_p + D_p) - m_v

Then C_v + D_v is, for each cell, the cheapest whole choice through this cell. Its minima per candidate are the
*min-marginals*, which exclude candidates once a good choice is known.

The time is the number of cells of all clique tables, K^(width + 1) each. Tables larger than the processor's cache are
processed in blocks of rows, and never exist in memory as a whole. Bertele and Brioschi, Nonserial Dynamic Programming
(1972); Dechter, Bucket elimination (1999); the downward pass is that of Shenoy and Shafer (1990). Not good for graphs
of large width.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from planner.limits import check, room
from planner.strategy_search.solvers.elimination.order import Bucket, Input, Schedule
from planner.strategy_search.solvers.problem import Array

# Cells that are summed at once: 256 KiB, which fit in the cache of one core.
BLOCK = 2**15

_MANY = 300
"""The number of buckets from which on repeated ones are looked for: a problem with repeated blocks that are not cut
apart."""


def eliminate(schedule: Schedule, tables: list[Array], rest: int = 0) -> list[Array]:
    """Go up: the tables (nodes, then pairs) followed by the message of every bucket; the last one is the optimum.

    The last `rest` buckets are left alone; see `remainder`.
    """
    return [table[0] for table in eliminate_together(schedule, [table[None] for table in tables], rest)]


def eliminate_together(
    schedule: Schedule, tables: list[Array], rest: int = 0, known: list[Array] | None = None
) -> list[Array]:
    """`eliminate` for several problems of one structure: the first axis of every table counts them.

    Tables are small, and most of the time is overhead per addition, so several problems cost little more than one.
    `known` is an earlier result for tables of which some are the same: messages that depend on these alone are reused.
    """
    tables = list(tables)
    room(schedule.message_cells * len(tables[0]) * 8, "the messages of an elimination")
    alike = _Alike(tables) if len(schedule.buckets) - rest >= _MANY else None
    changed = {at for at, table in enumerate(tables) if known is not None and table is not known[at]}
    cells, problems = 0, len(tables[0])
    shapes = schedule.shapes(tuple([table.shape[-1] for table in tables[: schedule.variables]]))
    for bucket, (own, size) in zip(schedule.buckets[: len(schedule.buckets) - rest], shapes, strict=False):
        inputs = bucket.inputs + bucket.child_inputs
        like = None if alike is None else alike.known(inputs)
        if like is not None:
            message = tables[like]
        elif known is not None and changed.isdisjoint([source.table for source in inputs]):
            message = known[len(tables)]
        else:
            views, shape = [tables[source.table][source.together] for source in inputs], (problems, *own)
            if (cells := cells + problems * size) > BLOCK:
                check()
                cells = 0
            if problems * size <= BLOCK:
                message = np.minimum.reduce(_sum(views, shape), axis=1)
            else:
                message = _least(views, shape)
        if known is not None and message is not known[len(tables)]:
            changed.add(len(tables))
        tables.append(message)
    return tables


class _Alike:
    """Buckets that sum equal tables in the same way, and so send the same message: blocks that repeat in one problem.

    Every table has the number of the first table that equals it.
    """

    def __init__(self, tables: Sequence[Array]) -> None:
        first: dict[tuple[tuple[int, ...], bytes], int] = {}
        self.numbers = [first.setdefault((table.shape, table.tobytes()), at) for at, table in enumerate(tables)]
        self.sums: dict[tuple[tuple[int, tuple[int, ...]], ...], int] = {}

    def known(self, inputs: Sequence[Input]) -> int | None:
        """The message of an earlier bucket with the same inputs, if there is one; the next message gets that number."""
        key = tuple((self.numbers[source.table], source.axes) for source in inputs)
        number = self.sums.setdefault(key, len(self.numbers))
        known = number if number < len(self.numbers) else None
        self.numbers.append(number)
        return known


def optimum(tables: list[Array]) -> float:
    """The value of the cheapest choice, from the tables that `eliminate` returns; infinite if no choice is allowed."""
    return tables[-1].item()


def remainder(schedule: Schedule, tables: list[Array], rest: int) -> Array:
    """The cheapest choice for every combination of the last `rest` variables, one axis each in order of elimination.

    `tables` are those that `eliminate_together` returns with the same `rest`; the first axis still counts problems.
    """
    done = len(schedule.buckets) - rest
    order = [bucket.variable for bucket in schedule.buckets[done:]]
    states = math.prod(tables[variable].shape[-1] for variable in order)
    room(2 * states * len(tables[0]) * 8, "the states of the boundary between blocks")
    sums: dict[tuple[int, ...], Array] = {}  # by the axes of the tables: few of many tables have all axes
    for bucket in schedule.buckets[done:]:
        clique = (bucket.variable, *bucket.scope)
        arrived = [source for child, source in zip(bucket.children, bucket.child_inputs, strict=True) if child < done]
        for source in (*bucket.inputs, *arrived):
            check()
            axes = [order.index(clique[axis]) for axis in source.axes]
            shape = [len(tables[0])] + [1] * rest
            for axis, size in zip(axes, tables[source.table].shape[1:], strict=True):
                shape[1 + axis] = size
            one, own = tables[source.table].reshape(shape), tuple(sorted(axes))
            sums[own] = sums[own] + one if own in sums else one
    total = np.zeros([len(tables[0]), *[tables[variable].shape[-1] for variable in order]])
    for own in sorted(sums, key=len):
        total += sums[own]
    return total


Traced = dict[tuple[int, object], int]
"""The cheapest candidate of a variable; the key has the variable and the candidates of the variables that it depends
on."""


def backtrack(
    schedule: Schedule,
    tables: list[Array],
    last: Sequence[int] = (),
    *,
    place: int | None = None,
    traced: Traced | None = None,
) -> list[int]:
    """The cheapest choice, from the tables that `eliminate` returns; of several the first one, last bucket first.

    `last` has the candidates of the variables that `eliminate` did not eliminate, in order of elimination. `place` is
    the number of the problem, if there are several. `traced` carries results from one call to the next.
    """
    traced = {} if traced is None else traced
    choice = [0] * schedule.variables
    done = len(schedule.buckets) - len(last)
    for bucket, candidate in zip(schedule.buckets[done:], last, strict=True):
        choice[bucket.variable] = candidate
    everything = slice(None)
    for variable, depends, sources in schedule.descent(done):
        key = (variable, depends(choice))
        if (known := traced.get(key)) is not None:
            choice[variable] = known
            continue
        column: Array | None = None
        for table, others in sources:
            part = tables[table] if place is None else tables[table][place]
            if others:
                part = part[(everything, *[choice[v] for v in others])]  # type: ignore[arg-type]  # numpy's stubs
            column = part if column is None else column + part
        assert column is not None, "every variable has a node"
        choice[variable] = traced[key] = int(column.argmin())
    return choice


def complete(schedule: Schedule, tables: list[Array]) -> tuple[list[Array], list[Array]]:
    """Go down: per bucket the cheapest completion D over its scope, and per variable its min-marginals.

    `tables` are those of `eliminate`. D is infinite where the message is: nothing can be completed there.
    """
    offset = len(tables) - len(schedule.buckets)
    down = [np.full(table.shape, math.inf) for table in tables[offset:]]
    down[-1] = np.zeros(())
    marginals = tables[: schedule.variables]
    for step in range(len(schedule.buckets) - 1, -1, -1):
        bucket = schedule.buckets[step]
        marginal = np.full(tables[bucket.variable].shape, math.inf)
        marginals[bucket.variable] = marginal
        rest = tuple(range(1, len(bucket.scope) + 1))
        for rows, total in totals(bucket, tables, down[step]):
            marginal[rows] = total.min(axis=rest)
            for child, source in zip(bucket.children, bucket.child_inputs, strict=True):
                _descend(down[child], rows, total, source)
        for child in bucket.children:
            message = tables[offset + child]
            reachable = np.isfinite(message)
            down[child][reachable] -= message[reachable]
            down[child][~reachable] = math.inf
    return down, marginals


def totals(bucket: Bucket, tables: list[Array], down: Array | None) -> Iterator[tuple[slice, Array]]:
    """The clique table, plus the completion over its scope if one is given, block by block of rows of its variable."""
    views = [tables[source.table][source.expand] for source in bucket.inputs + bucket.child_inputs]
    if down is not None:
        views.append(down[None])
    shape = _shape(bucket, tables)
    for rows in _blocks(shape):
        check()
        total = _sum([_rows(view, rows) for view in views])
        yield rows, np.broadcast_to(total, (rows.stop - rows.start, *shape[1:]))


def _descend(down: Array, rows: slice, total: Array, source: Input) -> None:
    """Update the completion of a child's scope with this block of the parent's table."""
    others = tuple(axis for axis in range(total.ndim) if axis not in source.axes)
    best = total.min(axis=others) if others else total
    if source.axes:
        down[rows] = best
    else:
        np.minimum(down, best, out=down)


def _shape(bucket: Bucket, tables: list[Array]) -> tuple[int, ...]:
    """The shape of the clique table of one problem."""
    return (tables[bucket.variable].shape[-1], *[tables[variable].shape[-1] for variable in bucket.scope])


def _least(views: list[Array], shape: tuple[int, ...]) -> Array:
    """The minimum over the second axis of a broadcast sum; the first axis counts problems."""
    if math.prod(shape) <= BLOCK:
        found: Array = np.minimum.reduce(_sum(views, shape), axis=1)
        return found
    if len(views[0]) > 1:
        alone = [[view[at : at + 1] for view in views] for at in range(shape[0])]
        return np.concatenate([_least(each, (1, *shape[1:])) for each in alone])
    best: Array | None = None
    for rows in _blocks(shape[1:]):
        check()
        part: Array = np.minimum.reduce(_sum([_rows(view[0], rows) for view in views]), axis=0)
        best = part if best is None else np.minimum(best, part, out=best)
    assert best is not None, "a table has at least one row"
    return best[None]


def _sum(views: list[Array], shape: tuple[int, ...] = ()) -> Array:
    """Adds small tables first, so that few additions run over the full table. The order is fixed, and so is the
    rounding. `shape` is that of the sum, if known."""
    total, own = views[0], False
    for view in views[1:]:
        if own and total.shape == shape:
            total += view  # in place
        else:
            total, own = total + view, True
    return total


def _blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    step = max(1, BLOCK // math.prod(shape[1:]))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def _rows(view: Array, rows: slice) -> Array:
    return view[rows] if view.shape[0] > 1 else view
