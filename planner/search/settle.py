"""The exact problem of one rank of a found plan, for solvers that know nothing of pieces, columns or prices.

What is given: how many blocks stand in the stage, how many of them run each way, and, in a pipeline, the layout in
which stages meet. What is decided: the strategy of every operator, the stored layouts of every parameter, the operators
that keep their results, for all blocks of a group alike.

    minimise  w part + step      with  fixed + in_flight live + replay + transient  within the capacity

Two groups of recomputed blocks share one interior: the larger one counts.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.errors import RequestError
from planner.search.duals import Setting, State
from planner.search.evaluation import Outcome, RankFilling
from planner.search.pieces import Chain, Column, Key, Piece
from planner.search.problem import OPTIMALITY_TOLERANCE, Edge, Problem, Solution, Variable
from planner.search.request import SearchRequest
from planner.search.solvers import SOLVERS

Array = NDArray[np.float64]

GAP = 1e-5
"""The slowest rank is settled to this, relatively."""

ILP_SECONDS = 60.0
"""An integer program may take so long where the request has no time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of a rank: its blocks (or what stands outside of them) `times` in a chunk, `flights` micro-batches."""

    piece: Piece
    column: Column
    times: int
    flights: float


@dataclass(frozen=True, kw_only=True, eq=False)
class RankProblem:
    """A problem and what its candidates stand for: per variable the part, the key, and how many candidates keep nothing
    (those after them keep their results); the boundary belongs to no part."""

    problem: Problem
    parts: tuple[Part, ...]
    variables: tuple[tuple[int | None, Key, int], ...]
    choice: tuple[int, ...]  # of the plan that was found


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What an independent solver says of the slowest rank of a plan, its division into groups of blocks given.

    Attributes:
        solver, status: who, and what it proved (see `Solution.status`).
        busy_seconds: of the rank in a step, as planned.
        found_seconds: the least that the solver found; infinite if nothing.
        bound_seconds: it proved that nothing takes less.
        variables: of the problem.
        seconds: the solver took.
    """

    solver: str
    status: str
    busy_seconds: float
    found_seconds: float
    bound_seconds: float
    variables: int
    seconds: float

    @property
    def gap(self) -> float:
        """How much less, relatively, the rank could be busy at most."""
        return max(0.0, 1 - self.bound_seconds / self.busy_seconds) if self.busy_seconds else 0.0


def settle_and_certify(
    request: SearchRequest, chain: Chain, setting: Setting, outcome: Outcome
) -> tuple[tuple[RankFilling, ...], Certificate | None]:
    """The slowest rank solved exactly by the solver of the request's algorithm, its division into groups given; and,
    where asked for, what the integer program says of it."""
    problems = [
        rank_problem(chain, setting, rank, filling, outcome.state) for rank, filling in enumerate(outcome.ranks)
    ]
    planned = [found.problem.evaluate(found.choice).time for found in problems]
    slowest = planned.index(max(planned))
    found, busy, ranks = problems[slowest], planned[slowest], list(outcome.ranks)
    solver = request.algorithm if request.algorithm in SOLVERS else "dynamic_programming"
    certificate, solution = _certificate(solver, found, busy, request)
    if certificate.found_seconds < busy * (1 - OPTIMALITY_TOLERANCE):
        ranks[slowest] = _refilled(ranks[slowest], settled(found, solution))
    if request.certify and solver != "ilp":
        certificate, _ = _certificate("ilp", found, min(busy, certificate.found_seconds), request)
    return tuple(ranks), certificate if request.certify or solver != "dynamic_programming" else None


def _certificate(solver: str, found: RankProblem, busy: float, request: SearchRequest) -> tuple[Certificate, Solution]:
    options: dict[str, Any] = {}
    if solver == "dynamic_programming":
        options["relative_gap"] = GAP
    if solver == "ilp":
        options["time_limit"] = request.time_limit or ILP_SECONDS
    started = time.perf_counter()
    try:
        solution = SOLVERS[solver](found.problem, **options)
    except ValueError as error:  # too large for this solver
        raise RequestError(f"--search {solver}: {error}") from error
    better = solution.evaluation.time if solution.evaluation is not None else math.inf
    certificate = Certificate(
        solver=solver,
        status=solution.status,
        busy_seconds=busy,
        found_seconds=better,
        bound_seconds=min(solution.bound, busy),
        variables=len(found.problem.variables),
        seconds=time.perf_counter() - started,
    )
    return certificate, solution


def _refilled(filling: RankFilling, columns: Sequence[Column]) -> RankFilling:
    """The rank with other columns in place of its own, in the order of `parts_of`."""
    left = list(columns)
    head = left.pop(0) if filling.head is not None else None
    tail = left.pop() if filling.tail is not None else None
    inner: list[Column] = []
    for column, (_, equal) in zip(left, groupby(filling.inner, key=id), strict=True):
        inner += [column] * len(list(equal))
    return replace(filling, head=head, inner=tuple(inner), tail=tail)


def rank_problem(chain: Chain, setting: Setting, rank: int, filling: RankFilling, state: State) -> RankProblem:
    """The problem of one rank."""
    return _Builder(chain, setting, rank, filling, state).build()


def settled(found: RankProblem, solution: Solution) -> tuple[Column, ...]:
    """The columns of a solution, one for each part."""
    assert solution.choice is not None
    chosen: list[tuple[dict[Key, int], set[int]]] = [({}, set()) for _ in found.parts]
    for (part, key, plain), candidate in zip(found.variables, solution.choice, strict=True):
        places = range(len(found.parts)) if part is None else (part,)
        for place in places:
            chosen[place][0][key] = candidate % plain
            if candidate >= plain and isinstance(key, int):
                chosen[place][1].add(key)
    columns = []
    for ran, (candidates, kept) in zip(found.parts, chosen, strict=True):
        own = {key: candidates[key] for key in ran.piece.keys}
        kept |= {key for key in ran.column.kept if key in ran.piece.boundary}
        amounts = ran.piece.amounts_of(own, kept)
        columns.append(replace(ran.column, candidates=own, kept=frozenset(kept), amounts=amounts))
    return tuple(columns)


def parts_of(chain: Chain, setting: Setting, rank: int, filling: RankFilling) -> tuple[Part, ...]:
    """What a rank runs, equal blocks together, in the order of the model."""
    flights = setting.in_flight[rank]
    parts = []
    if filling.head is not None:
        parts.append(_part(chain.head, filling.head, 1, flights[0]))
    for _, equal in groupby(filling.inner, key=id):
        run = list(equal)
        parts.append(_part(chain.inner, run[0], len(run) * setting.chunks, math.fsum(flights) / setting.chunks))
    if filling.tail is not None:
        parts.append(_part(chain.tail, filling.tail, 1, flights[-1]))
    return tuple(parts)


def _part(pieces: Sequence[Piece], column: Column, times: int, flights: float) -> Part:
    piece = next(piece for piece in pieces if piece.recompute == column.recompute)
    return Part(piece=piece, column=column, times=times, flights=flights)


class _Builder:
    def __init__(self, chain: Chain, setting: Setting, rank: int, filling: RankFilling, state: State) -> None:
        self.chain, self.setting, self.state, self.beside = chain, setting, state, filling.beside
        self.parts = parts_of(chain, setting, rank, filling)
        self.free_boundary = setting.ranks == 1
        replayed = [(part.column.amounts.replay, place) for place, part in enumerate(self.parts)]
        self.counted = max(replayed)[1]  # the interior that counts
        self.names: list[tuple[int | None, Key, int]] = []
        self.place: dict[tuple[int | None, Key], int] = {}
        self.nodes: list[list[Array]] = []  # time, memory, transient
        self.pairs: list[tuple[int, int, Array, Array]] = []
        self.choice: list[int] = []

    def build(self) -> RankProblem:
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
        problem = Problem(variables=variables, edges=edges, memory_limit=self.setting.capacity - self.beside)
        return RankProblem(problem=problem, parts=self.parts, variables=tuple(self.names), choice=tuple(self.choice))

    def _add(self, number: int, part: Part) -> None:
        piece, m = part.piece, self.setting.weight
        interior = 1.0 if number == self.counted else 0.0
        time = m * part.times * piece.part
        time[: piece.nodes] += part.times * piece.step
        memory = part.times * part.flights * piece.live + interior * piece.replay
        memory[: piece.nodes] += part.times * piece.fixed
        keeping_time = m * part.times * piece.keeping_part
        keeping_memory = part.times * part.flights * piece.keeping_live + interior * piece.keeping_replay
        at: list[int] = []
        doubled: list[bool] = []
        for position, (key, size) in enumerate(zip(piece.keys, piece.sizes, strict=True)):
            cells = piece.node_cells(position)
            transient = piece.transient[position]
            plain = [time[cells], memory[cells], transient]
            kept = [time[cells] + keeping_time[cells], memory[cells] + keeping_memory[cells], transient]
            decided = key in part.column.kept
            shared = key in self.chain.boundary
            if shared:  # whether it keeps its results stays as it is: other parts may not have the choice
                node = kept if decided else plain
            elif keeping_time[cells].any():
                node = [np.concatenate(both) for both in zip(plain, kept, strict=True)]
            else:
                node = plain
            owner = None if shared else number
            known = self.place.get((owner, key))
            if known is None:
                known = self.place[owner, key] = len(self.nodes)
                if shared and not self.free_boundary:
                    state = self.state[self.chain.boundary.index(key)]
                    node[0] = np.where(np.arange(size) == state, node[0], math.inf)
                self.names.append((owner, key, size))
                self.nodes.append(node)
                self.choice.append(part.column.candidates[key] + (size if decided and not shared else 0))
            else:
                self._merge(known, node)
            at.append(known)
            doubled.append(len(self.nodes[known][0]) > size)
        for place, (first, second) in enumerate(piece.plan.pairs):
            cells, shape = piece.pair_cells(place), (piece.sizes[first], piece.sizes[second])
            tables = [values[cells].reshape(shape) for values in (time, memory)]
            one, two = at[first], at[second]
            repeated = [np.tile(table, (2 if doubled[first] else 1, 2 if doubled[second] else 1)) for table in tables]
            self.pairs.append((one, two, repeated[0], repeated[1]))

    def _merge(self, known: int, node: list[Array]) -> None:
        """A variable of the boundary that another part has added already."""
        ours = self.nodes[known]
        ours[0], ours[1] = ours[0] + node[0], ours[1] + node[1]
        ours[2] = np.maximum(ours[2], node[2])
