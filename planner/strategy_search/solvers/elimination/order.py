"""The order in which variables are eliminated, and the tables that meet at each step. Structure only, no numbers.

Eliminating a variable joins all its neighbours into a clique. The table of the clique has a cell for every combination
of candidates of the variable and its neighbours:

    a ── b ── c             a ── b           b ── d           d
    │         │    - c ─▶   │   ╱    - a ─▶          - b ─▶
    └─── d ───┘             └─ d
    scopes:                 c: (b, d)        a: (b, d)        b: (d)

1. Peel off leaves repeatedly: eliminating a variable with one neighbour adds no edge, so it is never wrong. Trees,
stars
   and the branches of a graph vanish here.
2. Eliminate the rest greedily by min-fill (fewest new edges, weighted by the cells they span), by min-size (smallest
   clique table), and by networkx's tree decompositions of least width, which count variables and not cells. Keep the
   order whose clique tables have the fewest cells in all.

Finding the best order is NP-hard (Arnborg, Corneil, Proskurowski 1987). For the chains with skips of neural networks,
of width 2 or 3, the greedy orders are practically optimal (Dechter 2003, chapter 4). Not good for graphs of large
width: no order is.

For those graphs a schedule may be relaxed. The tables of a variable are split into groups whose cliques stay small.
Each group takes the minimum over the variable separately, as if it had its own copy of it (mini-bucket elimination,
Dechter and Rish 2003). The result is at most the true minimum, so bounds remain bounds. A choice read back from it is
some choice, with its true cost. A step of a scan that reads slices of four long tensors is such a graph.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter

from planner.limits import check

EXACT = 2**28
"""The most cells of all clique tables with which a schedule that may be relaxed is exact: about a second on one
core."""

MANY = 200
"""The number of variables of a graph without leaves from which on tree decompositions are not tried: they take
quadratic time."""

_RELAXED = 1 / 4  # a relaxed schedule has about this share of the cells of an exact one
_SMALLEST, _LARGEST = 2**12, 2**20  # limits of the cells of a clique table in a relaxed schedule

WIDEST = 60
"""The most variables of a clique: numpy arrays have at most 64 axes, and a few of these count problems. Tables of more
axes are small if most variables have one candidate, as in a loop of many steps whose results are joined."""

Pairs = tuple[tuple[int, int], ...]
Index = tuple[slice | None, ...]
Graph = dict[int, set[int]]

_UNITS = 10**6
"""The precision to which the logarithm of a number of candidates is rounded."""

Descent = tuple[tuple[int, Callable[[list[int]], object], tuple[tuple[int, tuple[int, ...]], ...]], ...]
"""Variables, each with what takes the candidates of the variables that it depends on from a choice, and with its tables
and the variables that each of these depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A table that enters a clique table.

    Attributes:
        table: position among nodes, pairs and messages, in this order.
        axes: the axes of the clique table that it has, ascending; empty for a single number.
        others: the variables of its axes but the first, which is the eliminated one. For back-substitution.
        expand: index that gives it every axis of the clique table, for broadcasting.
        together: the same behind an axis that counts problems.
    """

    table: int
    axes: tuple[int, ...]
    others: tuple[int, ...]
    expand: Index
    together: Index


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One step: eliminate `variable`, whose neighbours are then `scope`, in order of elimination.

    `inputs` are the tables of the problem, small ones first. `children` are earlier buckets that send their messages
    here; `child_inputs` are those messages, whose axes start at 0 only if `variable` is among them.
    """

    variable: int
    scope: tuple[int, ...]
    inputs: tuple[Input, ...]
    children: tuple[int, ...]
    child_inputs: tuple[Input, ...]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The whole elimination.

    Attributes:
        buckets: in order of elimination; the last one has an empty scope. A relaxed schedule has several of one
            variable, one after the other.
        pairs: joined pairs of variables, each in order of elimination.
        edge_pairs: for each edge of the problem its pair, and whether its table has to be transposed.
        largest_table: cells of the largest clique table.
        cells: of all clique tables.
        message_cells: of all messages.
        exact: whether no bucket was split.
    """

    buckets: tuple[Bucket, ...]
    pairs: Pairs
    edge_pairs: tuple[tuple[int, bool], ...]
    largest_table: int
    cells: int
    message_cells: int
    exact: bool = True

    @cached_property
    def variables(self) -> int:
        """The number of variables."""
        return len({bucket.variable for bucket in self.buckets})

    @cached_property
    def widest(self) -> int:
        """The number of variables of the largest clique."""
        return max(1 + len(bucket.scope) for bucket in self.buckets)

    @cached_property
    def neighbours(self) -> tuple[tuple[tuple[int, int, bool], ...], ...]:
        """For each variable the variables that it is joined with, each with the index of the pair's table (tables of
        variables come first), and whether the variable is the first of the pair."""
        found: list[list[tuple[int, int, bool]]] = [[] for _ in range(self.variables)]
        for table, (first, second) in enumerate(self.pairs, start=self.variables):
            found[first].append((second, table, True))
            found[second].append((first, table, False))
        return tuple(map(tuple, found))

    @cached_property
    def _descents(self) -> dict[int, Descent]:
        return {}

    def descent(self, done: int) -> Descent:
        """The variables of the first `done` buckets, the last one first, with the tables that decide which candidate is
        cheapest, each with the other variables that it depends on."""
        if done not in self._descents:
            found = []
            for variable, buckets in itertools.groupby(reversed(self.buckets[:done]), key=lambda one: one.variable):
                every = [source for bucket in buckets for source in bucket.inputs + bucket.child_inputs if source.axes]
                others = tuple(dict.fromkeys(other for source in every for other in source.others))
                depends = itemgetter(*others or (variable,))  # its own candidate is still 0
                found.append((variable, depends, tuple((source.table, source.others) for source in every)))
            self._descents[done] = tuple(found)
        return self._descents[done]

    @cached_property
    def _shapes(self) -> dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]]:
        return {}

    def shapes(self, sizes: tuple[int, ...]) -> list[tuple[tuple[int, ...], int]]:
        """The shape of the clique table of each bucket, and its cells, for these numbers of candidates."""
        if sizes not in self._shapes:
            every = [(one.variable, *one.scope) for one in self.buckets]
            found = [tuple([sizes[variable] for variable in clique]) for clique in every]
            self._shapes[sizes] = [(shape, math.prod(shape)) for shape in found]
        return self._shapes[sizes]


@lru_cache(maxsize=256)
def schedule(
    sizes: tuple[int, ...], edges: Pairs, last: tuple[int, ...] = (), exact_cells: float = math.inf
) -> Schedule:
    """Plan the elimination of variables with these numbers of candidates, joined by these edges (repetition allowed).

    The variables in `last` are eliminated after all others, in this order. The schedule is relaxed if an exact one has
    more than `exact_cells`; the buckets of `last` are never split.
    """
    order = elimination_order(sizes, edges, last)
    found = _planned(sizes, edges, order, math.inf, len(last))
    if found.widest > WIDEST:
        fixed = [variable for variable, size in enumerate(sizes) if size == 1 and variable not in last]
        left = tuple(pair for pair in edges if not set(pair) & set(fixed))
        order = [*fixed, *(variable for variable in elimination_order(sizes, left, last) if variable not in set(fixed))]
        found = _planned(sizes, edges, order, math.inf, len(last), fixed=len(fixed))
        if found.cells <= exact_cells and found.widest <= WIDEST:
            return found
        most = min(exact_cells, _LARGEST)
        return _planned(sizes, edges, order, _cells_of_relaxed(most, order), len(last), fixed=len(fixed))
    if found.cells <= exact_cells:
        return found
    return _planned(sizes, edges, order, _cells_of_relaxed(exact_cells, order), len(last))


def _cells_of_relaxed(exact_cells: float, order: list[int]) -> float:
    """The most cells of a clique table of a relaxed schedule."""
    return min(max(_RELAXED * exact_cells / len(order), _SMALLEST), _LARGEST)


def _planned(
    sizes: tuple[int, ...], edges: Pairs, order: list[int], most: float, rest: int, fixed: int = 0
) -> Schedule:
    """The elimination in this order; the first `fixed` variables have one candidate each."""
    position = {variable: step for step, variable in enumerate(order)}
    pair_number: dict[tuple[int, int], int] = {}
    edge_pairs = []
    for first, second in edges:
        flip = position[first] > position[second]
        pair = (second, first) if flip else (first, second)
        edge_pairs.append((pair_number.setdefault(pair, len(pair_number)), flip))
    buckets = _buckets(sizes, order, position, tuple(pair_number), most, rest, fixed)
    cells = [math.prod(sizes[v] for v in (bucket.variable, *bucket.scope)) for bucket in buckets]
    done = len(buckets) - rest
    alone = set(order[:fixed])
    return Schedule(
        buckets=buckets,
        pairs=tuple(pair_number),
        edge_pairs=tuple(edge_pairs),
        largest_table=max(cells),
        cells=sum(cells[:done]),
        message_cells=sum(
            number // sizes[bucket.variable] for number, bucket in zip(cells[:done], buckets, strict=False)
        ),
        exact=sum(bucket.variable not in alone for bucket in buckets) == len(order) - fixed,
    )


def _buckets(
    sizes: tuple[int, ...],
    order: list[int],
    position: dict[int, int],
    pairs: Pairs,
    most: float,
    rest: int,
    fixed: int,
) -> tuple[Bucket, ...]:
    """Put every table into the bucket of the first of its variables to be eliminated, and derive the messages. Buckets
    with more than `most` cells are split, except the last `rest`. Buckets of the first `fixed` variables, which have
    one candidate, are split into one per table: the minimum over one candidate is that of each table."""
    total = len(order)
    waiting: list[list[tuple[int, tuple[int, ...]]]] = [[(variable, (variable,))] for variable in order]
    for number, pair in enumerate(pairs):
        waiting[position[pair[0]]].append((total + number, pair))
    arriving: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in order]
    buckets: list[Bucket] = []
    for step, variable in enumerate(order):
        check()
        groups = [(waiting[step], arriving[step])]
        if step < min(fixed, total - 1):  # all that is left meets in the last bucket
            groups = [([one], []) for one in waiting[step]] + [([], [one]) for one in arriving[step]]
        elif most < math.inf and step < total - rest:
            groups = _split(sizes, variable, waiting[step], arriving[step], most)
        for tables, messages in groups:
            members = {v for _, scope in (*tables, *messages) for v in scope} - {variable}
            clique = (variable, *sorted(members, key=position.__getitem__))
            bucket = Bucket(
                variable=variable,
                scope=clique[1:],
                inputs=tuple(
                    sorted((_input(table, scope, clique) for table, scope in tables), key=lambda i: len(i.axes))
                ),
                children=tuple(child for child, _ in messages),
                child_inputs=tuple(_input(total + len(pairs) + child, scope, clique) for child, scope in messages),
            )
            # A component that is done sends its number to the very last bucket, which makes one tree of all.
            if step < total - 1:
                home = position[bucket.scope[0]] if bucket.scope else total - 1
                arriving[home].append((len(buckets), bucket.scope))
            buckets.append(bucket)
    return tuple(buckets)


_Tables = list[tuple[int, tuple[int, ...]]]  # with the variables of each


def _split(
    sizes: tuple[int, ...], variable: int, tables: _Tables, messages: _Tables, most: float
) -> list[tuple[_Tables, _Tables]]:
    """Tables and messages of a bucket in groups of at most `most` cells each, the widest ones first; one that is larger
    by itself is a group of its own."""
    both = [(False, one) for one in tables] + [(True, one) for one in messages]
    groups: list[tuple[set[int], _Tables, _Tables]] = []
    for arrived, (table, scope) in sorted(both, key=lambda one: -len(one[1][1])):
        group = next((one for one in groups if _fits(sizes, one[0] | set(scope), most)), None)
        if group is None:
            group = ({variable}, [], [])
            groups.append(group)
        members, held, received = group
        members.update(scope)
        (received if arrived else held).append((table, scope))
    return [(held, received) for _, held, received in groups]


def _fits(sizes: tuple[int, ...], clique: set[int], most: float) -> bool:
    return len(clique) <= WIDEST and math.prod(sizes[v] for v in clique) <= most


def _input(table: int, scope: tuple[int, ...], clique: tuple[int, ...]) -> Input:
    axes = tuple(clique.index(variable) for variable in scope)
    expand = tuple(slice(None) if axis in axes else None for axis in range(len(clique)))
    return Input(table=table, axes=axes, others=scope[1:], expand=expand, together=(slice(None), *expand))


def elimination_order(sizes: tuple[int, ...], edges: Pairs, last: tuple[int, ...] = ()) -> list[int]:
    """All variables, first eliminated first; ties go to the lower position, those in `last` to the end."""
    graph: Graph = {variable: set() for variable in range(len(sizes))}
    for first, second in edges:
        graph[first].add(second)
        graph[second].add(first)
    kept = frozenset(last)
    peeled = _peel(graph, kept)
    logs = [round(math.log2(size) * _UNITS) for size in sizes]  # whole numbers: the same on every machine
    orders = [_greedy(graph, sizes, logs, kept, fill_first=fill_first) for fill_first in (True, False)]
    orders += [(_cells(graph, sizes, order), order) for order in _decompositions(graph, kept)]
    _, best = min(orders, key=lambda found: found[0])
    return [*peeled, *best, *last]


def _decompositions(core: Graph, kept: frozenset[int]) -> list[list[int]]:
    """Orders by tree decompositions: leaves go first, and with each leaf the variables that no other bag has. The last
    bag has all that are kept, as they are joined for it."""
    if not MANY > len(core) > len(kept) + 2:  # any order of three variables is as good
        return []
    import networkx as nx  # takes a fifth of a second to load
    from networkx.algorithms.approximation import treewidth_min_degree, treewidth_min_fill_in

    graph = nx.Graph({variable: list(near) for variable, near in core.items()})
    graph.add_edges_from(itertools.combinations(sorted(kept), 2))
    orders = []
    for heuristic in (treewidth_min_fill_in, treewidth_min_degree):
        check()
        _, tree = heuristic(graph)
        root = min((bag for bag in tree if kept <= bag), key=sorted)
        order: list[int] = []
        for bag in nx.dfs_postorder_nodes(tree, root, sort_neighbors=lambda bags: sorted(bags, key=sorted)):
            inner = next(iter(nx.shortest_path(tree, bag, root)[1:2]), kept)
            order += sorted(bag - inner)
        orders.append(order)
    return orders


def _cells(core: Graph, sizes: tuple[int, ...], order: Sequence[int]) -> int:
    """The number of cells of all clique tables if variables are eliminated in this order."""
    graph, cells = {variable: set(near) for variable, near in core.items()}, 0
    for variable in order:
        near = graph.pop(variable)
        cells += sizes[variable] * math.prod(sizes[other] for other in near)
        for other in near:
            graph[other] |= near
            graph[other] -= {other, variable}
    return cells


def _peel(graph: Graph, kept: frozenset[int]) -> list[int]:
    """Remove variables with at most one neighbour until only those to keep are left, and return them in order."""
    ready = [variable for variable in graph if len(graph[variable]) <= 1 and variable not in kept]
    heapq.heapify(ready)
    peeled = []
    while ready:
        variable = heapq.heappop(ready)
        if variable not in graph:
            continue
        for neighbour in graph.pop(variable):
            graph[neighbour].discard(variable)
            if len(graph[neighbour]) == 1 and neighbour not in kept:
                heapq.heappush(ready, neighbour)
        peeled.append(variable)
    return peeled


def _greedy(
    core: Graph, sizes: tuple[int, ...], logs: list[int], kept: frozenset[int], *, fill_first: bool
) -> tuple[int, list[int]]:
    """Repeatedly eliminate the variable with the least score; returns the cells of all tables, and the order.

    A score is the weight of the edges that eliminating the variable adds, then the size of its clique, or the other way
    round. Where hubs join hundreds of variables, counting edges takes most of the time, so neighbours are also stored
    as the bits of a number.
    """
    graph = {variable: set(others) for variable, others in core.items()}
    near = {variable: sum(1 << other for other in others) for variable, others in core.items()}

    def score(variable: int) -> tuple[int, int]:
        own, fill, clique = near[variable], 0, logs[variable]
        others = own.bit_count() - 1
        for other in graph[variable]:
            fill += logs[other] * (others - (own & near[other]).bit_count())
            clique += logs[other]
        return (fill, clique) if fill_first else (clique, fill)

    current = {variable: score(variable) for variable in core if variable not in kept}
    heap = [(value, variable) for variable, value in current.items()]
    heapq.heapify(heap)
    order, cells = [], 0
    while heap:
        check()
        value, variable = heapq.heappop(heap)
        if current.get(variable) != value:
            continue
        del current[variable]
        order.append(variable)
        neighbours, clique = graph.pop(variable), near.pop(variable)
        cells += sizes[variable] * math.prod(sizes[neighbour] for neighbour in neighbours)
        for neighbour in neighbours:
            graph[neighbour].discard(variable)
            near[neighbour] &= ~(1 << variable)
        touched = clique
        for one in neighbours:
            for other in _bits(clique & ~near[one] & ~(1 << one)):
                graph[one].add(other)
                graph[other].add(one)
                near[one] |= 1 << other
                near[other] |= 1 << one
                touched |= near[one] & near[other]  # that edge need not be added any more
        for other in _bits(touched):
            if other not in kept and (renewed := score(other)) != current[other]:
                current[other] = renewed
                heapq.heappush(heap, (renewed, other))
    return cells, order


def _bits(number: int) -> list[int]:
    """The places of the bits of a number, lowest first."""
    found = []
    while number:
        lowest = number & -number
        found.append(lowest.bit_length() - 1)
        number ^= lowest
    return found
