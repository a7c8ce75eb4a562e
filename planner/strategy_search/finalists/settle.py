"""The exact problem of one rank of a found plan, for solvers that know nothing of pieces, columns or prices.

Given are the number of blocks in the stage, how many of them run each way, and, in a pipeline, the layout at which
stages meet. Decided are the strategy of every operator, the stored layouts of every parameter, and the operators that
keep their results, for all blocks of a group alike.

    minimise  m part + step      with  fixed + in_flight live + replay + transient  within the capacity

All m micro-batches of the slowest rank count, including those that fill the pipeline.

Two groups of recomputed blocks share one interior: the larger one counts.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.errors import LimitError, RequestError
from planner.limits import seconds_left
from planner.strategy_search.decomposition.chain import Chain
from planner.strategy_search.decomposition.heterogeneous_pipeline import HeterogeneousPipeline
from planner.strategy_search.decomposition.pieces import Column, Piece
from planner.strategy_search.decomposition.priced import State
from planner.strategy_search.decomposition.setting import Setting
from planner.strategy_search.decomposition.stage_problem import Part, PartsProblem, parts_problem
from planner.strategy_search.engine.outcome import Outcome, RankFilling
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.solvers import SOLVERS, dynamic_programming
from planner.strategy_search.solvers.elimination.order import EXACT
from planner.strategy_search.solvers.problem import OPTIMALITY_TOLERANCE, Problem, Solution

GAP = 1e-5
"""Relative gap to which the slowest rank is settled."""

_FRONTS = 10_000
"""Maximum entries of a Pareto front if no certificate is asked for. With ten times as many, deep pipelines of experts
took twice as long; of 21 such plans 15 were as fast, the others up to 0.13% faster."""

ILP_SECONDS = 60.0
"""Time limit, in seconds, of an integer program if the request has no time limit."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankProblem:
    """The problem of a rank, the columns of the plan for its parts, and their choice in the problem."""

    found: PartsProblem
    columns: tuple[Column, ...]
    choice: tuple[int, ...]

    @property
    def problem(self) -> Problem:
        return self.found.problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What an independent solver says of the slowest rank of a plan, with its division into groups of blocks given.

    Attributes:
        solver, status: the solver, and what it proved (see `Solution.status`).
        busy_seconds: of the rank in a step, as planned.
        found_seconds: the lowest that the solver found; infinite if nothing.
        bound_seconds: the lower bound that it proved.
        variables: of the problem.
        seconds: run time of the solver.
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
        """The relative gap: the rank could be busy for at most this share less."""
        return max(0.0, 1 - self.bound_seconds / self.busy_seconds) if self.busy_seconds else 0.0


def settle_and_certify(
    request: SearchRequest, pipeline_of_kinds: HeterogeneousPipeline, setting: Setting, outcome: Outcome
) -> tuple[tuple[RankFilling, ...], float, Certificate | None]:
    """Solve the slowest rank exactly, with its division into groups given, by the solver of the request's algorithm.
    Returns the ranks, how long the slowest is busy then, and, if the request asks for it, what the integer program says
    of that rank as it was planned."""
    ranks = list(outcome.ranks)
    slowest, found = _slowest(pipeline_of_kinds, setting, outcome)
    busy = found.problem.evaluate(found.choice).time
    solver = request.algorithm if request.algorithm in SOLVERS else "dynamic_programming"
    answer = _certificate(solver, found, busy, request)
    least = busy
    if answer is not None:
        least = min(busy, answer[0].found_seconds)
        if answer[0].found_seconds < busy * (1 - OPTIMALITY_TOLERANCE):
            assert answer[1].evaluation is not None
            columns = settled(found, answer[1])
            ranks[slowest] = _refilled(ranks[slowest], columns, _peak(found, columns, answer[1].evaluation.peak))
    if request.certify and solver != "ilp":
        answer = _certificate("ilp", found, busy, request)
    wanted = request.certify or solver != "dynamic_programming"
    return tuple(ranks), least, answer[0] if wanted and answer is not None else None


def settling_saves(pipeline_of_kinds: HeterogeneousPipeline, setting: Setting, outcome: Outcome) -> float:
    """An upper bound on the seconds of a step that settling may save: what memory at the best price proves of the
    slowest rank, with the rest of the step unchanged; infinite if the problem is too wide to tell."""
    _, found = _slowest(pipeline_of_kinds, setting, outcome)
    try:
        least = dynamic_programming.lower_bound(found.problem, cell_limit=EXACT)
    except ValueError:
        return math.inf
    return max(0.0, found.problem.evaluate(found.choice).time - least)


def _slowest(pipeline_of_kinds: HeterogeneousPipeline, setting: Setting, outcome: Outcome) -> tuple[int, RankProblem]:
    """The index of the slowest rank of an outcome, and its problem."""
    ranks = outcome.ranks
    slowest = max(range(len(ranks)), key=lambda rank: _busy(ranks[rank], setting))
    own_setting = pipeline_of_kinds.setting_of(setting, slowest)
    chain = pipeline_of_kinds.chain_of(slowest)
    return slowest, rank_problem(chain, own_setting, slowest, ranks[slowest], outcome.state)


def _busy(filling: RankFilling, setting: Setting) -> float:
    """About the seconds of a step that a rank takes, to find the slowest."""
    held = [column.amounts for column in (filling.head, filling.tail) if column is not None]
    held += [column.amounts for column in filling.inner]
    return math.fsum(setting.micro_batches * own.part + own.step for own in held)


def _peak(found: RankProblem, columns: Sequence[Column], peak: float) -> float:
    """Peak bytes of a rank with these columns, if its problem says `peak`: another interior may be the largest now."""
    interiors = [column.amounts.replay for column in columns]
    counted = next(own for part, own in zip(found.found.parts, interiors, strict=True) if part.interior)
    return peak + max(interiors) - counted


def _certificate(
    solver: str, found: RankProblem, busy: float, request: SearchRequest
) -> tuple[Certificate, Solution] | None:
    """The certificate and the solution of a solver; None if dynamic programming is asked and the problem is too wide
    for it, or if a limit of the planner is reached."""
    options: dict[str, Any] = {}
    if solver == "dynamic_programming":
        options.update(relative_gap=GAP, cell_limit=EXACT, known=found.choice)
        if not request.certify:
            options.update(front_limit=_FRONTS)
    if solver == "ilp":
        left = seconds_left()
        if left <= 0:
            return None
        options["time_limit"] = min(request.time_limit or ILP_SECONDS, left)
    started = time.perf_counter()
    try:
        solution = SOLVERS[solver](found.problem, **options)
    except LimitError:
        return None
    except ValueError as error:  # too large for this solver
        if solver == "dynamic_programming":
            return None
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


def _refilled(filling: RankFilling, columns: Sequence[Column], peak: float) -> RankFilling:
    """The rank with other columns in place of its own, in the order of the model; `peak` is that of the columns by
    themselves."""
    left = list(columns)
    head = left.pop(0) if filling.head is not None else None
    tail = left.pop() if filling.tail is not None else None
    twins = dict(zip(dict.fromkeys(map(id, filling.inner)), left, strict=True))
    inner = [twins[id(column)] for column in filling.inner]
    return replace(filling, head=head, inner=tuple(inner), tail=tail, peak=peak + filling.beside)


def rank_problem(chain: Chain, setting: Setting, rank: int, filling: RankFilling, state: State) -> RankProblem:
    """The exact problem of one rank. If the host cannot hold everything that may be offloaded, no tensor takes more of
    it than in the plan that was found."""
    ran = _ran(chain, setting, rank, filling)
    hosted = (part.times * part.piece.most_hosted(part.flights) for part, _ in ran)
    scarce = setting.host < math.inf and sum(hosted) > setting.host
    counted = max(range(len(ran)), key=lambda place: ran[place][1].amounts.replay)
    parts = [
        replace(
            part,
            kept=frozenset(column.kept & set(part.piece.boundary)),
            interior=place == counted,
            hosted=column.candidates if scarce else None,
        )
        for place, (part, column) in enumerate(ran)
    ]
    found = parts_problem(
        parts,
        chain.boundary,
        weight=float(setting.micro_batches),
        capacity=setting.capacity - filling.beside,
        state=state if setting.ranks > 1 else None,
    )
    choice = []
    for owner, key, plain in found.variables:
        column = next(c for place, (_, c) in enumerate(ran) if owner in (None, place) and key in c.candidates)
        keeps = owner is not None and key in column.kept - ran[owner][0].piece.always
        choice.append(column.candidates[key] + (plain if keeps else 0))
    return RankProblem(found=found, columns=tuple(column for _, column in ran), choice=tuple(choice))


def settled(found: RankProblem, solution: Solution) -> tuple[Column, ...]:
    """The columns of a solution, one for each part."""
    assert solution.choice is not None
    columns = []
    taken = found.found.candidates(solution.choice)
    for part, column, (candidates, kept) in zip(found.found.parts, found.columns, taken, strict=True):
        own = {key: candidates[key] for key in part.piece.keys}
        amounts = part.piece.amounts_of(own, kept)
        columns.append(replace(column, candidates=own, kept=kept | part.piece.always, amounts=amounts))
    return tuple(columns)


def _ran(chain: Chain, setting: Setting, rank: int, filling: RankFilling) -> list[tuple[Part, Column]]:
    """The parts and columns of a rank, with equal blocks together, in the order of the model. Chunks that run in
    different ways count at the moment at which they hold most."""
    chunks, rows = filling.of_chunks(setting.copies), setting.fullest[rank]
    most = [max(numbers) for numbers in zip(*rows, strict=True)]
    flights = (setting.flights(rank),) if setting.uneven else setting.in_flight[rank]
    if len(set(chunks)) > 1:
        flights = max(rows, key=lambda row: _kept(filling, chunks, row))
        most = list(flights)

    def one(pieces: Sequence[Piece], column: Column, times: int, number: float) -> tuple[Part, Column]:
        piece = next(p for p in pieces if (p.recompute, p.kind, p.home) == (column.recompute, column.kind, column.home))
        return Part(piece=piece, times=times, flights=number), column

    ran = [] if filling.head is None else [one(chain.head, filling.head, 1, most[0])]
    alike = dict[int, tuple[Column, list[float]]]()
    for number, inner in zip(flights, chunks, strict=True):
        for column in inner:
            alike.setdefault(id(column), (column, []))[1].append(number)
    ran += [one(chain.inner, column, len(held), math.fsum(held) / len(held)) for column, held in alike.values()]
    if filling.tail is not None:
        ran.append(one(chain.tail, filling.tail, 1, most[-1]))
    return ran


def _kept(filling: RankFilling, chunks: Sequence[Sequence[Column]], flights: Sequence[float]) -> float:
    """Bytes that a rank keeps with the given numbers of micro-batches in flight for each chunk."""
    inner = (number * column.amounts.live for number, own in zip(flights, chunks, strict=True) for column in own)
    ends = ((filling.head, flights[0]), (filling.tail, flights[-1]))
    return math.fsum(inner) + math.fsum(number * column.amounts.live for column, number in ends if column is not None)
