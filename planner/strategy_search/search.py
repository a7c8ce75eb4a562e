"""The search, on one screen.

    traced graph ── prepare ──> graph with identities, blocks ── fold ──> template
    families of configurations (stages, mesh), least lower bound first:                         (space, engine)
        a bound for all micro-batch sizes from the largest one; its members join the queue
    configurations, least lower bound first:
        stop when the bound reaches the best step time
        tables = prices of the template on this mesh at this micro-batch                        (cost_table)
        pieces = tables cut where blocks meet; solved for prices of memory; stages filled       (pieces, evaluation)
    of the best few, the fastest by their schedules                                             (contenders, plan.step)
    become plans, which are bound and priced once more, independently                           (assemble, plan.predict)

What is minimised, and proved, is a sum: the slowest rank sets the pace, all fill the pipeline, the latest one ends the
step. As the schedule runs it, uneven ranks take less, and communication that has no work to hide under takes more; so
plans whose sums are close are told apart by that.

Every configuration has a proved bound: its own where it was evaluated, its family's or that of the work alone where it
was not. The least of them says how far the result may be from the best plan there is.
"""

import contextlib
import heapq
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from costmodels import peak_memory
from hardware_profiles import Cluster, Hidden, MixedCluster, parts_of
from planner.errors import InfeasibleError, LimitError, PlannerError, RequestError
from planner.graph.operator_graph import OperatorGraph
from planner.limits import check, finishing, limited
from planner.plan.binding.bind import BoundPlan, prepare
from planner.plan.plan import Plan
from planner.sharding.update import AUTO_GATHERS, GATHERS
from planner.strategy_search.engine.assemble import assembly
from planner.strategy_search.engine.contenders import Contender, Contenders
from planner.strategy_search.engine.contexts import ContextNotes, ContextOutcome
from planner.strategy_search.engine.engine import Engine, Family
from planner.strategy_search.engine.evaluation import Outcome
from planner.strategy_search.engine.finalists import OPTIMAL, Finalists, OverfullError, Ranked
from planner.strategy_search.request.constraints import NothingAgreesError
from planner.strategy_search.request.limit_words import nothing_before
from planner.strategy_search.request.refusals import no_configuration, space_of
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration, bounds
from planner.strategy_search.request.template import fold

_LOG = logging.getLogger(__name__)
"""What becomes of every configuration, for people who ask; INFO."""

_SWEPT = 3  # configurations that recursive programming decides once more, with sweeps

_LARGE_GRAPH = 600
"""Operators, without those of repeated blocks, from which something cheap is evaluated first."""

_ROUNDS = 4  # with less memory each, where a schedule holds more than the search thought

_LOOKED_AT = 4
"""Configurations that are evaluated where nothing fits, the leanest by their bounds, to say how much is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where the search is.

    Attributes:
        total: configurations in all.
        done: evaluated so far.
        best_seconds: objective of the best plan yet; infinite before the first.
        bound_seconds: no plan has a smaller one, as far as is known.
        phase: what is being done.
    """

    total: int
    done: int
    best_seconds: float
    bound_seconds: float
    phase: str = "searching"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What the search did: configurations there were, evaluated ones, problems solved, seconds; whether it was stopped
    before its end, and whether that was as its own memory was `full`."""

    configurations: int
    evaluated: int
    solved: int
    seconds: float
    stopped: bool = False
    full: bool = False


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The fastest plans, fastest first, of different configurations, and what is proved about them.

    No plan in the space of the request has an objective below `bound_seconds`; a step may take less than its objective
    (see `planner.strategy_search.engine.contenders`). Where axes are free, that is the space of
    meshes of one and two axes whose virtual stages on a rank run alike; `covered` is False where the best plan has more
    axes, so that nothing is proved about its like. `placements` is how many ways to place tables on the host were
    compared, 0 where there was no choice: what is proved is about the one that was taken. `contexts` compares ways to
    split the sequence, where there was a choice.
    """

    plans: tuple[Ranked, ...]
    bound_seconds: float
    statistics: Statistics
    covered: bool = True
    placements: int = 0
    contexts: tuple[ContextOutcome, ...] = ()

    @property
    def bound(self) -> BoundPlan:
        return self.plans[0].bound

    @property
    def plan(self) -> Plan:
        return self.plans[0].plan

    @property
    def gap(self) -> float:
        """How much less, relatively, the objective of another plan could be at most."""
        return max(0.0, 1 - self.bound_seconds / self.plans[0].objective)

    def cut_short(self) -> "SearchResult":
        """The same of a search that was stopped before its end."""
        return replace(self, statistics=replace(self.statistics, stopped=True))

    @property
    def status(self) -> str:
        """ "optimal" where no plan in the space has a smaller objective, else "feasible"."""
        return "optimal" if self.gap <= OPTIMAL and self.covered else "feasible"


def search(
    request: SearchRequest,
    on_progress: Callable[[Progress], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
    cutoff: float = math.inf,
) -> SearchResult:
    """The fastest plans that fit, of those whose objectives are close to the least.

    Between two configurations `cancelled` is asked; where it says so, or a limit of the planner is reached
    (`planner.limits`, the time limit of the request among them), the best plans so far are returned. Plans whose
    objective is `cutoff` seconds or more are of no interest.

    Raises RequestError where the request divides into nothing, InfeasibleError, with the bytes that are missing, where
    nothing fits, LimitError where a limit was reached before anything was found.
    """
    with limited(request.time_limit):
        try:
            check()
            return _searched(request, on_progress, cancelled, cutoff)
        except (LimitError, MemoryError) as error:
            raise nothing_before(request, error) from error


def _searched(
    request: SearchRequest, on_progress: Callable[[Progress], None], cancelled: Callable[[], bool], cutoff: float
) -> SearchResult:
    if request.update.gathers == AUTO_GATHERS:
        return _gathering_each_way(request, on_progress, cancelled, cutoff)
    attempt, stated = _Search(request, on_progress, cancelled, cutoff), None
    for _ in range(_ROUNDS):
        try:
            return attempt.run()
        except OverfullError as error:
            if isinstance(request.cluster, MixedCluster):
                raise InfeasibleError(error.message) from None
            stated = stated or attempt.limits
            memory = max(attempt.memory - error.excess, attempt.memory / 2)
            leaner = replace(attempt.request, memory_limit=memory)
            attempt = _Search(leaner, on_progress, cancelled, cutoff)
            attempt.limits = stated
            known = error
        except InfeasibleError:
            if stated is None:
                raise
            break
    raise InfeasibleError(known.message) from None


def _gathering_each_way(
    request: SearchRequest, on_progress: Callable[[Progress], None], cancelled: Callable[[], bool], cutoff: float
) -> SearchResult:
    """The fastest of what is found for every way to gather weights: each is another problem, with sums and memory of
    its own, and what is proved is proved about the one that is taken."""
    found, refusals, late = list[SearchResult](), list[PlannerError](), False
    for gathers in GATHERS:
        try:
            one = replace(request, update=replace(request.update, gathers=gathers))
            found.append(search(one, on_progress, cancelled, cutoff))
        except (RequestError, InfeasibleError) as error:
            refusals.append(error)
            late = late or isinstance(error, LimitError)
    if not found:
        raise refusals[0]
    best = min(found, key=lambda result: result.plans[0].seconds)
    return best.cut_short() if late else best


def find_fitting(request: SearchRequest, cancelled: Callable[[], bool] = lambda: False) -> bool:
    """Whether anything fits. Tries the leanest configurations first and stops at the first that does, or, without an
    answer and so with False, where it is cancelled. Raises LimitError where a limit of the planner is reached."""
    engine, _ = _engine(request)
    if engine.hopeless:
        return False
    for members in _families(_space(engine)):
        family = _family(engine, members)
        for configuration in sorted(members, key=lambda c: -c.micro_batches):
            if cancelled():
                return False
            if family is not None and family.priced_seconds(configuration, 0.0) == math.inf:
                continue
            with contextlib.suppress(NothingAgreesError):
                if engine.evaluate(configuration, enough=math.inf).ranks:
                    return True
    return False


def _space(engine: Engine) -> list[Configuration]:
    return list(space_of(engine.request, engine.template))


def _families(space: list[Configuration]) -> list[tuple[Configuration, ...]]:
    families: dict[object, list[Configuration]] = {}
    for configuration in space:
        families.setdefault(configuration.family, []).append(configuration)
    return [tuple(members) for members in families.values()]


def _family(engine: Engine, members: tuple[Configuration, ...]) -> Family | None:
    """What the largest micro-batch proves about all; None where it cannot be cut into the others."""
    largest = min(members, key=lambda c: c.micro_batches)
    if any(c.micro_batches % largest.micro_batches for c in members):
        return None
    try:
        return engine.family(largest)
    except NothingAgreesError:
        return None


def _engine(request: SearchRequest) -> tuple[Engine, OperatorGraph]:
    prepared, blocks = prepare(request.graph, request.imbalance, request.update.placed)
    repeated = frozenset(request.pinned.repeated)
    template = fold(prepared, blocks, request.cluster.software, repeated)
    if "device" not in request.offload.weights and not template.every_own_parameter:
        raise RequestError(
            "offload: the weights of repeated blocks are offloaded, and this model has no blocks of which each is"
            " like the one before; leave weights out of --offload"
        )
    if "device" not in request.offload.saved and not template.blocks.count:
        raise RequestError(
            "offload: what repeated blocks save is offloaded, and this model has no blocks of which each is like the"
            " one before; leave saved out of --offload"
        )
    asked = (request.precision, request.optimizer, request.update, request.offload)
    limits = tuple(bounds(template, request.batch, group, *asked) for group in parts_of(request.cluster))
    return Engine(request=request, template=template, limits=limits), prepared


class _Search:
    """Best-first over families of configurations, then over their members."""

    def __init__(
        self,
        request: SearchRequest,
        on_progress: Callable[[Progress], None],
        cancelled: Callable[[], bool],
        cutoff: float,
    ) -> None:
        self.started = time.perf_counter()
        self.request, self.on_progress, self.cancelled, self.limit = request, on_progress, cancelled, cutoff
        self.engine, self.prepared = _engine(request)
        hides = request.cluster.software.hidden != Hidden() or request.update.ahead
        self.contenders = Contenders(request.top, decided=request.pinned.pipeline == 1 and not hides)
        memory = max(group.device.memory for group in self.engine.groups)
        self.memory = min(memory, memory if request.memory_limit is None else request.memory_limit)
        self.limits = tuple(self.engine.limit_bytes(group) * (1 + OPTIMAL) for group in self.engine.groups)
        self.least = self.missing = math.inf
        self.fullest = (0, 1)  # the rank that needs it, of so many
        self.short = self.engine.groups[0]  # the group of devices that it is on
        self.proved = math.inf
        self.total = self.evaluated = self.solved = 0
        self.queue: list[tuple[float, tuple[object, ...], Family | None, tuple[Configuration, ...], float]] = []
        self.hint = 0.0
        self.contexts = ContextNotes()
        self.covered, self.full = True, False
        self.disagreement: NothingAgreesError | None = None

    @property
    def cutoff(self) -> float:
        """Plans as slow as that are of no interest."""
        return min(self.limit, self.contenders.cutoff) if self.request.prune else self.limit

    def run(self) -> SearchResult:
        """Search until nothing better is left, it is cancelled, or a limit of the planner is reached."""
        recursive = self.request.algorithm == "recursive_programming"
        try:
            stopped = self._recursively() if recursive else self._best_first()
            return self._result(stopped)
        except (LimitError, MemoryError) as error:
            if not self.contenders.found:
                raise
            self.full = isinstance(error, MemoryError) or error.memory
        with finishing():
            return self._result(True)

    def _best_first(self) -> bool:
        """Whether it was stopped before its end."""
        self._open_families()
        self._tell()
        self._begin_cheaply()
        while self.queue and self.queue[0][0] < self.cutoff:
            if self.cancelled():
                return True
            check()
            bound, _, family, members, asked = heapq.heappop(self.queue)
            try:
                if family is None and len(members) > 1:
                    self._open_family(members, bound)
                elif not self._delayed(bound, family, members[0], asked):
                    self._evaluate(members[0], family, bound)
            except (LimitError, MemoryError):
                self.proved = min(self.proved, bound)  # what was taken from the queue may hold the best plan
                raise
        self._refine()
        return False

    def _begin_cheaply(self) -> None:
        """Of a large graph, evaluate one configuration first in which candidates are few, on one axis or none, so that
        there is an answer: the bounds of a family alone may take longer than there is time."""
        if len(self.engine.template.graph.operators) < _LARGE_GRAPH:
            return
        plain = [c for c in self._space() if c.pipeline == 1 and len(c.mesh) < 2 and not c.roles]
        best = min(plain, key=lambda c: (abs(math.log(_samples(self.request, c))), _order(c)), default=None)
        if best is not None:
            self._evaluate(best, None, self.engine.bound(best))

    def _refine(self) -> None:
        """Whether the best plan gets faster on a mesh of three or four axes, which are not searched exhaustively."""
        found = self.contenders.found
        if not found or self.request.algorithm != "dynamic_programming" or not self.request.prune:
            return
        self._tell("refining")
        best = found[0]
        whole = assembly(best.pipeline_of_kinds.chain, best.outcome.ranks, best.configuration.virtual_stages)
        refined = self.engine.refined(best.configuration, whole, best.objective)
        if refined is not None:
            adopted = self.engine.adopt(best.configuration, refined)
            self._take(adopted, self.engine.evaluate(adopted), best.outcome.bound)
            self.covered = self.contenders.found[0].configuration != adopted

    def _recursively(self) -> bool:
        """Axis by axis for every number of ranks and micro-batches.

        For a number of ranks the micro-batches are tried outwards from one sample on every device, as long as that
        helps: a heuristic, like what it calls. The best are then decided once more with sweeps. Returns whether it was
        stopped before its end.
        """
        tried: list[tuple[float, tuple[object, ...], Configuration]] = []
        stopped = False
        for members in self._lines():
            middle = min(range(len(members)), key=lambda at: abs(math.log(_samples(self.request, members[at]))))
            for direction in (1, -1):
                worse, best = 0, math.inf
                steps = range(middle, len(members)) if direction == 1 else range(middle - 1, -1, -1)
                for at in steps:
                    check()
                    stopped = stopped or self.cancelled()
                    if worse > 1 or stopped or self.engine.bound(members[at]) >= self.cutoff:
                        break
                    seconds = self._descend(members[at], sweeps=0)
                    tried.append((seconds, _order(members[at]), members[at]))
                    worse, best = (0, seconds) if seconds < best else (worse + 1, best)
        for _, _, configuration in sorted(tried)[:_SWEPT]:
            if not (stopped := stopped or self.cancelled()):
                self._descend(configuration, sweeps=3)
        return stopped

    def _lines(self) -> list[tuple[Configuration, ...]]:
        """Configurations that differ in their micro-batches only; without a given mesh one stands for all meshes."""
        space = self._space()
        self.proved = min(map(self.engine.bound, space))  # of all: not every one is looked at
        given = self.request.pinned.mesh is not None or bool(self.request.shards)
        lines: dict[object, list[Configuration]] = {}
        for c in space:
            if given or c.roles or len(c.mesh) < 2:
                lines.setdefault((c.family, c.virtual_stages), []).append(c)
        self.total = sum(map(len, lines.values()))
        return [tuple(sorted(line, key=lambda c: c.micro_batches)) for line in lines.values()]

    def _descend(self, configuration: Configuration, *, sweeps: int) -> float:
        """Evaluate what recursive programming finds for a configuration; its seconds."""
        try:
            found = self.engine.recursive(configuration, sweeps=sweeps)
            if found is None:
                self.evaluated += 1
                return math.inf
            adopted = self.engine.adopt(configuration, found)
            outcome = self.engine.evaluate(adopted)
        except NothingAgreesError as error:
            self.disagreement = self.disagreement or error
            return math.inf
        self._take(adopted, outcome, self.engine.bound(configuration))
        return found.seconds

    def _space(self) -> list[Configuration]:
        """All configurations of the request."""
        space = _space(self.engine)
        if not space:
            raise RequestError(no_configuration(self.request, self.engine.template))
        return space

    def _open_families(self) -> None:
        space = self._space()
        self.total = len(space)
        for members in _families(space):
            bound = min(map(self.engine.bound, members))
            heapq.heappush(self.queue, (bound, _order(members[0]), None, members, 0.0))

    def _open_family(self, members: tuple[Configuration, ...], floor: float) -> None:
        """Put the members of a family into the queue, each with the bound that the largest micro-batch proves."""
        family = _family(self.engine, members) if self.request.prune else None
        proved = [floor] * len(members) if family is None else family.step_seconds(members)
        for configuration, least in zip(members, proved, strict=True):
            bound = max(floor, self.engine.bound(configuration), least)
            heapq.heappush(self.queue, (bound, _order(configuration), family, (configuration,), -1.0))

    def _delayed(self, bound: float, family: Family | None, configuration: Configuration, asked: float) -> bool:
        """Whether a price of memory that mattered elsewhere shows that a configuration can wait."""
        if family is None:
            return False
        price = family.hint or self.hint
        if price == asked:
            return False
        better = max(bound, family.priced_seconds(configuration, price))
        heapq.heappush(self.queue, (better, _order(configuration), family, (configuration,), price))
        return True

    def _evaluate(self, configuration: Configuration, family: Family | None, bound: float) -> None:
        hint = (family.hint if family is not None else 0.0) or self.hint
        try:
            outcome = self.engine.evaluate(configuration, cutoff=self.cutoff, hint=hint)
        except NothingAgreesError as error:
            self.disagreement = self.disagreement or error
            _LOG.info("%s: left out, %s", _words(configuration), error)
            return
        if outcome.price:
            self.hint = outcome.price
            if family is not None:
                family.hint = outcome.price
        own = 0.0 if self.engine.spreads else outcome.bound  # of the strategies that were spread to, not of all
        self._take(configuration, outcome, max(bound, own))

    def _take(self, configuration: Configuration, outcome: Outcome, bound: float) -> None:
        """Note an outcome; `bound`: no plan of its kind is faster."""
        self.evaluated += 1
        self.solved += outcome.solved
        self._missed(configuration, outcome)
        found = outcome.seconds if outcome.ranks else math.inf
        known = max(bound, outcome.bound)
        self.contexts.note(configuration, bound=known, seconds=found, least=outcome.least)
        _LOG.info("%s: %s", _words(configuration), _fate(outcome, self.cutoff))
        self.proved = min(self.proved, bound)
        if outcome.ranks and outcome.seconds < self.cutoff:
            pipeline_of_kinds = self.engine.pipeline_of_kinds(configuration)
            self.contenders.add(
                Contender(configuration=configuration, outcome=outcome, pipeline_of_kinds=pipeline_of_kinds)
            )
        self._tell()

    def _tell(self, phase: str = "searching") -> None:
        self.on_progress(
            Progress(
                total=self.total,
                done=self.evaluated,
                best_seconds=self.contenders.best,
                bound_seconds=self._bound(),
                phase=phase,
            )
        )

    def _bound(self) -> float:
        """What is proved by now: evaluated configurations by their own bounds, the others by those in the queue."""
        ahead = self.queue[0][0] if self.queue else math.inf
        return min(self.proved, ahead, self.contenders.best)

    def _result(self, stopped: bool) -> SearchResult:
        if not self.contenders.found:
            if self.disagreement is not None and not self.evaluated:
                raise self.disagreement
            if self.least == math.inf and not stopped:
                self._tell("measuring what is missing")
                self._look_at_the_leanest()
            raise _nothing_fits(self.request, self.least, self.fullest, self.short, stopped)
        self._tell("scheduling the best")
        bound = self._bound()
        for ahead, _, _, members, _ in sorted(self.queue, key=lambda one: one[:2]):
            self.contexts.note(members[0], bound=ahead)
            more = f" and {len(members) - 1} with other micro-batches" if len(members) > 1 else ""
            why = f"takes {ahead:.4g} s or more, and a plan of {self.contenders.best:.4g} s is known"
            _LOG.info("%s%s: cut off, %s", _words(members[0]), more, why if not stopped else "the search was stopped")
        return SearchResult(
            plans=Finalists(
                request=self.request,
                engine=self.engine,
                prepared=self.prepared,
                found=self.contenders.found,
                bound=bound,
                limits=self.limits,
                covered=self.covered,
            ).plans(),
            bound_seconds=bound,
            covered=self.covered,
            contexts=self.contexts.outcomes(),
            statistics=Statistics(
                configurations=self.total,
                evaluated=self.evaluated,
                solved=self.solved,
                seconds=time.perf_counter() - self.started,
                stopped=stopped,
                full=self.full,
            ),
        )

    def _look_at_the_leanest(self) -> None:
        """Where bounds rule out everything, evaluate a few configurations to know how much is missing."""
        known = [
            (family.least_bytes(members[0]), _order(members[0]), members[0])
            for _, _, family, members, _ in self.queue
            if family is not None
        ]
        for _, _, configuration in sorted(known)[:_LOOKED_AT]:
            with contextlib.suppress(NothingAgreesError):
                self._missed(configuration, self.engine.evaluate(configuration))

    def _missed(self, configuration: Configuration, outcome: Outcome) -> None:
        """Note what would be enough, and where, for a configuration in which nothing fits."""
        group = self.engine.group_of(configuration, outcome.fullest)
        missing = outcome.least - self.engine.capacities[group]
        if missing < self.missing:
            self.missing, self.least = missing, outcome.least
            self.fullest, self.short = (outcome.fullest, configuration.pipeline), self.engine.groups[group]


def _samples(request: SearchRequest, configuration: Configuration) -> float:
    """Samples of a micro-batch on every device of a rank."""
    devices = request.cluster.devices / configuration.pipeline
    return request.global_batch / configuration.micro_batches / devices


def _order(configuration: Configuration) -> tuple[object, ...]:
    """Configurations of equal bound come in a fixed order."""
    c = configuration
    return c.pipeline, c.virtual_stages, c.micro_batches, c.mesh, c.roles, c.order


def _words(configuration: Configuration) -> str:
    """`pipeline 8 of 1 stages, mesh 2x4, 32 micro-batches`."""
    c = configuration
    roles = f" ({', '.join(c.roles)})" if c.roles else ""
    virtual = f" of {c.virtual_stages} stages" if c.virtual_stages > 1 else ""
    mesh = "x".join(map(str, c.mesh)) or "1"
    groups = f", groups {'-'.join(str(group + 1) for group in c.order)}" if c.order else ""
    return f"pipeline {c.pipeline}{virtual}, mesh {mesh}{roles}, {c.micro_batches} micro-batches{groups}"


def _fate(outcome: Outcome, cutoff: float) -> str:
    """What came of a configuration that was evaluated."""
    if outcome.ranks:
        return f"{outcome.seconds:.4g} s found, none under {outcome.bound:.4g} s"
    if outcome.bound < math.inf:
        return f"cut off, none under {outcome.bound:.4g} s, and plans from {cutoff:.4g} s on are of no interest"
    least = f", {outcome.least / 2**30:.1f} GiB would be needed" if outcome.least < math.inf else ""
    return f"does not fit{least}"


def _nothing_fits(
    request: SearchRequest, least: float, fullest: tuple[int, int], group: Cluster, stopped: bool
) -> InfeasibleError:
    device = group.device
    if stopped:
        return InfeasibleError("no plan that fits was found before the search was stopped; give it more time")
    needed = float(peak_memory(least, 0.0, request.cluster.software.buffers, device))
    memory = device.memory if request.memory_limit is None else min(device.memory, request.memory_limit)
    where = _rank_words(*fullest) + (f" ({group.name})" if isinstance(request.cluster, MixedCluster) else "")
    if not memory < needed < math.inf:
        return InfeasibleError(
            f"{request.algorithm} found no plan of {request.model.reference} that fits on {request.cluster.devices} x "
            f"{request.cluster.name}, which does not prove that there is none; try dynamic_programming, or more memory"
        )
    return InfeasibleError(
        f"{request.model.reference} does not fit on {request.cluster.devices} x {request.cluster.name}: the "
        f"leanest plan looked at needs {_gib(needed)} per device{where}, {_gib(needed - memory)} more"
        f" than the {_gib(memory)} there are",
        needed=needed,
        missing=needed - memory,
    )


def _rank_words(rank: int, ranks: int) -> str:
    return f" at pipeline rank {rank} of {ranks}" if ranks > 1 else ""


def _gib(nbytes: float) -> str:
    """GiB, with as many digits as small numbers need."""
    return f"{nbytes / 2**30:.{1 if nbytes >= 2**30 else 3}f} GiB"
