"""One stage as a problem for general solvers, which know nothing of pieces, prices or columns.

    minimise  weight x part + step      with  fixed + in_flight live + replay + transient  within the capacity

Its parts are pieces, each with a number of copies: the operators before the blocks, groups of blocks that run alike,
and the operators behind the blocks. An operator that may keep its results has each candidate twice: first without
keeping, then with keeping. Groups of recomputed blocks share one interior; that of one group is counted.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.strategy_search.decomposition.pieces import Piece
from planner.strategy_search.decomposition.priced import State
from planner.strategy_search.request.template import Key
from planner.strategy_search.solvers.problem import Edge, Problem, Variable

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece that a stage has `times` times, with the activations of `flights` micro-batches.

    `kept`: the operators at the boundary that keep their results; other parts may not have that choice. `interior`:
    whether the interior of this part is the one that is counted. `hosted`: candidates; none may be chosen that keep
    more on the host than these, by themselves or in pairs; any may if that is None.
    """

    piece: Piece
    times: int
    flights: float
    kept: frozenset[int] = frozenset()
    interior: bool = True
    hosted: Mapping[Key, int] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PartsProblem:
    """A problem, and what its candidates mean. `variables` has the part, the key, and the number of candidates that
    keep nothing; the candidates after those keep their results. The part is None for variables of the boundary."""

    problem: Problem
    parts: tuple[Part, ...]
    variables: tuple[tuple[int | None, Key, int], ...]

    def candidates(self, choice: Sequence[int]) -> tuple[tuple[dict[Key, int], frozenset[int]], ...]:
        """For each part the candidate of every variable, and the operators that keep their results."""
        chosen: list[tuple[dict[Key, int], set[int]]] = [({}, set(part.kept)) for part in self.parts]
        for (owner, key, plain), candidate in zip(self.variables, choice, strict=True):
            for place in range(len(self.parts)) if owner is None else (owner,):
                chosen[place][0][key] = candidate % plain
                if candidate >= plain and isinstance(key, int):
                    chosen[place][1].add(key)
        return tuple((taken, frozenset(kept)) for taken, kept in chosen)


def parts_problem(
    parts: Sequence[Part],
    boundary: Sequence[Key],
    *,
    weight: float,
    capacity: float,
    state: State | None = None,
    hosted: float = 0.0,
) -> PartsProblem:
    """The problem of some parts that agree at the boundary. `state` fixes the boundary, if the stage must match other
    stages. `hosted` is a price of the host's memory, in seconds per byte."""
    return _Builder(parts, boundary, weight, capacity, state, hosted).build()


class _Builder:
    def __init__(
        self,
        parts: Sequence[Part],
        boundary: Sequence[Key],
        weight: float,
        capacity: float,
        state: State | None,
        hosted: float,
    ) -> None:
        self.parts, self.boundary, self.weight, self.capacity = tuple(parts), boundary, weight, capacity
        self.state, self.hosted = state, hosted
        self.names: list[tuple[int | None, Key, int]] = []
        self.place: dict[tuple[int | None, Key], int] = {}
        self.nodes: list[list[Array]] = []  # time, memory, transient
        self.pairs: list[tuple[int, int, Array, Array]] = []

    def build(self) -> PartsProblem:
        for number, part in enumerate(self.parts):
            self._add(number, part)
        variables = tuple(
            Variable(name=f"{key} of part {part}", time=time, memory=memory, transient=transient)
            for (part, key, _), (time, memory, transient) in zip(self.names, self.nodes, strict=True)
        )
        edges = tuple(
            Edge(first=a, second=b, time=time, memory=memory)
            if a < b
            else Edge(first=b, second=a, time=time.T, memory=memory.T)
            for a, b, time, memory in self.pairs
        )
        problem = Problem(variables=variables, edges=edges, memory_limit=self.capacity)
        return PartsProblem(problem=problem, parts=self.parts, variables=tuple(self.names))

    def _add(self, number: int, part: Part) -> None:
        piece, interior = part.piece, 1.0 if part.interior else 0.0
        time = self.weight * part.times * piece.part
        time[: piece.nodes] += part.times * piece.step
        if self.hosted and piece.hosted is not None:
            time[: piece.nodes] += self.hosted * part.times * piece.hosted
        if self.hosted and piece.hosted_live is not None:
            piece.hosted_live.add_to(time, self.hosted * part.times * part.flights)
        on_host = None if part.hosted is None else piece.on_host(part.flights)
        memory = part.times * part.flights * piece.live.all()
        piece.replay.add_to(memory, interior)
        memory[: piece.nodes] += part.times * piece.fixed
        more_time = self.weight * part.times * piece.keeping_part
        more_memory = part.times * part.flights * piece.keeping_live + interior * piece.keeping_replay
        places = []
        for position, (key, size) in enumerate(zip(piece.keys, piece.sizes, strict=True)):
            cells = piece.node_cells(position)
            transient = piece.transient[position]
            if part.hosted is not None and on_host is not None:
                time[cells][on_host[cells] > on_host[cells][part.hosted[key]]] = math.inf
            plain = [time[cells], memory[cells], transient]
            keeping = [time[cells] + more_time[cells], memory[cells] + more_memory[cells], transient]
            if key in self.boundary:
                node = keeping if key in part.kept else plain
                places.append(self._at_boundary(key, size, node))
            else:
                both = [np.concatenate(pair) for pair in zip(plain, keeping, strict=True)]
                places.append(self._new(number, key, size, both if more_time[cells].any() else plain))
        for place, (first, second) in enumerate(piece.plan.pairs):
            cells, shape = piece.pair_cells(place), (piece.sizes[first], piece.sizes[second])
            if part.hosted is not None and on_host is not None:
                taken = part.hosted[piece.keys[first]] * shape[1] + part.hosted[piece.keys[second]]
                time[cells][on_host[cells] > on_host[cells][taken]] = math.inf
            one, two = places[first], places[second]
            again = (len(self.nodes[one][0]) // shape[0], len(self.nodes[two][0]) // shape[1])
            tables = [np.tile(values[cells].reshape(shape), again) for values in (time, memory)]
            self.pairs.append((one, two, tables[0], tables[1]))

    def _new(self, owner: int | None, key: Key, size: int, node: list[Array]) -> int:
        self.place[owner, key] = len(self.nodes)
        self.names.append((owner, key, size))
        self.nodes.append(node)
        return self.place[owner, key]

    def _at_boundary(self, key: Key, size: int, node: list[Array]) -> int:
        """A variable that all parts share."""
        if (None, key) not in self.place:
            if self.state is not None:
                state = self.state[list(self.boundary).index(key)]
                node[0] = np.where(np.arange(size) == state, node[0], math.inf)
            return self._new(None, key, size, node)
        known = self.nodes[self.place[None, key]]
        known[0], known[1], known[2] = known[0] + node[0], known[1] + node[1], np.maximum(known[2], node[2])
        return self.place[None, key]
