"""The search, on one screen.

    traced graph ── prepare ──> graph with identities, blocks ── fold ──> template
    for every configuration, least lower bound first:                                  (space)
        stop when the bound reaches the best step time
        tables = prices of the template on this mesh at this micro-batch               (cost_table)
        for every kind of stage: problem = tables weighed by the stage; solve it       (stage_problem, solvers)
    the best choices become a plan, which is bound and priced once more, independently (assemble, plan.predict)

Inside a stage the answer is exact: the solver proves that no other strategies are faster within the memory. Around it
every configuration is tried or cut off by a bound. All stages of a pipeline meet in one layout, which the first stage
chooses; the stages between the first and the last share one solution.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from costmodels import in_flight, peak_memory, step_time, usable_memory
from hardware_profiles import Cluster
from planner.errors import InfeasibleError, RequestError
from planner.graph.blocks import BlockRun
from planner.graph.operator_graph import OperatorGraph
from planner.plan.bind import bind, prepare
from planner.plan.plan import PLANNER_VERSION, ClusterReference, ModelReference, Plan, Prediction, Provenance, Training
from planner.plan.predict import predict
from planner.search.assemble import StageChoice, groups_of, input_layouts, stages_of
from planner.search.cost_table import CostTables, TableBuilder
from planner.search.problem import Solution
from planner.search.solvers import SOLVERS
from planner.search.space import FREE, Bounds, Configuration, Pinned, bounds, configurations
from planner.search.stage_problem import NO_PINS, Pins, StageProblem, StageTerms, stage_problem
from planner.search.template import Share, Template, fold
from planner.sharding.mesh import build_mesh
from planner.sharding.rescale import rescale_batch

ALGORITHMS = ("dynamic_programming",)
"""Searches that can be asked for; `exhaustive` is the oracle of the tests."""


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """What to plan:

    a traced graph whose example inputs have `batch` samples, a cluster with its devices, and the training step.
    """

    graph: OperatorGraph
    batch: int
    model: ModelReference
    cluster: Cluster
    global_batch: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    algorithm: str = "dynamic_programming"
    pinned: Pinned = FREE
    prune: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where the search is: configurations in all, done so far, and the best step time yet."""

    total: int
    done: int
    best_seconds: float


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best plan, and how it was found.

    `bound` is a proved lower bound on the step time within the space searched.
    """

    plan: Plan
    configurations: int
    tried: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    configuration: Configuration
    seconds: float
    tables: CostTables
    choices: tuple[StageChoice, ...]
    solutions: tuple[Solution, ...]


def search(request: SearchRequest, on_progress: Callable[[Progress], None] = lambda _: None) -> SearchResult:
    """The fastest plan that fits.

    Raises RequestError where the request divides into nothing, InfeasibleError, with the bytes that are missing, where
    nothing fits.
    """
    started = time.perf_counter()
    prepared, blocks = prepare(request.graph)
    template = fold(prepared, blocks)
    limits = bounds(template, request.batch, request.cluster, request.precision, request.optimizer)
    space = _ordered_space(request, template, limits)
    engine = _Engine(request=request, template=template, limits=limits)
    best: _Found | None = None
    least = math.inf
    tried = 0
    for done, (bound, configuration) in enumerate(space):
        if best is not None and request.prune and bound >= best.seconds:
            break
        outcome = engine.attempt(configuration, best.seconds if best is not None and request.prune else math.inf)
        tried += 1
        if isinstance(outcome, _Found) and (best is None or outcome.seconds < best.seconds):
            best = outcome
        elif isinstance(outcome, float):
            least = min(least, outcome)
        on_progress(Progress(total=len(space), done=done + 1, best_seconds=best.seconds if best else math.inf))
    if best is None:
        raise _nothing_fits(request, least)
    plan = _plan(request, prepared, blocks, best)
    return SearchResult(plan=plan, configurations=len(space), tried=tried, seconds=time.perf_counter() - started)


def find_fitting(request: SearchRequest) -> bool:
    """Whether anything fits. Tries the leanest configurations first and stops at the first that does."""
    prepared, blocks = prepare(request.graph)
    template = fold(prepared, blocks)
    limits = bounds(template, request.batch, request.cluster, request.precision, request.optimizer)
    engine = _Engine(request=request, template=template, limits=limits)
    space = configurations(template, request.cluster.devices, request.global_batch, request.pinned)
    lean = sorted(space, key=lambda c: (not c.recompute, -c.micro_batches, c.stages, c.mesh))
    return any(isinstance(engine.attempt(configuration, math.inf), _Found) for configuration in lean)


def _ordered_space(request: SearchRequest, template: Template, limits: Bounds) -> list[tuple[float, Configuration]]:
    devices = request.cluster.devices
    space = list(configurations(template, devices, request.global_batch, request.pinned))
    if not space:
        raise RequestError(_no_configuration(request, template))
    keyed = [(limits.step_seconds(c, devices, request.global_batch), c) for c in space]
    return sorted(
        keyed, key=lambda item: (item[0], item[1].stages, item[1].recompute, item[1].micro_batches, item[1].mesh)
    )


def _no_configuration(request: SearchRequest, template: Template) -> str:
    wanted = {
        name: value
        for name in ("stages", "mesh", "micro_batches")
        if (value := getattr(request.pinned, name)) is not None
    }
    if wanted.get("stages", 1) > 1 and not template.pipelines:
        return (
            f"{request.model.reference} cannot be cut into {wanted['stages']} pipeline stages: that takes equal blocks,"
            " one after the other, that share nothing but what each hands to the next; leave the stages at 1"
        )
    return (
        f"nothing divides evenly: {request.cluster.devices} devices, global batch {request.global_batch}, "
        f"{template.blocks.count} blocks,"
        f" with {', '.join(f'{k} = {v}' for k, v in wanted.items()) or 'no option pinned'}; stages must divide "
        "both devices and blocks,"
        " micro-batches the global batch"
    )


@dataclass(kw_only=True)
class _Engine:
    """Solves configurations; keeps the table builder of each mesh."""

    request: SearchRequest
    template: Template
    limits: Bounds

    def __post_init__(self) -> None:
        self._builders: dict[tuple[int, ...], TableBuilder] = {}
        self._last: tuple[tuple[tuple[int, ...], int], CostTables] | None = None
        self._scaled: dict[int, Template] = {}

    def attempt(self, configuration: Configuration, upper_bound: float) -> "_Found | float | None":
        """A solution, or the least bytes that would be needed, or None where it cannot beat the upper bound."""
        request = self.request
        room = usable_memory(request.cluster.device)
        needed = self.limits.device_bytes(
            configuration, request.cluster.devices, request.global_batch, self.template.blocks.count
        )
        if needed > room:
            return needed
        tables = self._tables(configuration)
        solve = SOLVERS[request.algorithm]
        choices: list[StageChoice] = []
        solutions: list[Solution] = []
        pins = NO_PINS
        for first_block, blocks, terms in stage_kinds(configuration, self.template):
            problem = stage_problem(tables, terms, request.cluster, room, pins)
            solution = solve(problem.problem, upper_bound=upper_bound)
            if solution.choice is None:
                return solution.least_memory if solution.status == "infeasible" else None
            operators, parameters = problem.choices(solution.choice)
            choices.append(
                StageChoice(first_block=first_block, blocks=blocks, operators=operators, parameters=parameters)
            )
            solutions.append(solution)
            pins = _meeting(tables, operators, parameters) if pins is NO_PINS else pins
        seconds = _assembled_seconds(configuration, tables, choices, request.cluster)
        return _Found(
            configuration=configuration,
            seconds=seconds,
            tables=tables,
            choices=tuple(choices),
            solutions=tuple(solutions),
        )

    def _tables(self, configuration: Configuration) -> CostTables:
        part = self.request.global_batch // configuration.micro_batches
        key = (configuration.mesh, part)
        if self._last is None or self._last[0] != key:
            if configuration.mesh not in self._builders:
                self._builders[configuration.mesh] = TableBuilder(
                    mesh=build_mesh(self.request.cluster, configuration.mesh),
                    cluster=self.request.cluster,
                    precision=self.request.precision,
                    optimizer=self.request.optimizer,
                )
            if part not in self._scaled:
                graph = rescale_batch(self.template.graph, self.request.batch, part)
                self._scaled[part] = replace(self.template, graph=graph)
            self._last = (key, self._builders[configuration.mesh].build(self._scaled[part]))
        return self._last[1]


def stage_kinds(configuration: Configuration, template: Template) -> list[tuple[int, int, StageTerms]]:
    """First block, number of blocks and terms of every kind of stage:

    first, those between, last. Those between run as the second does, which holds the most micro-batches of them.
    """
    p, share = configuration.stages, template.blocks.count // configuration.stages
    kinds = [(0, 1), (1, p - 2), (p - 1, 1)] if p > 2 else [(0, 1), (1, 1)] if p == 2 else [(0, 1)]
    found = []
    for stage, count in kinds:
        terms = StageTerms(
            share=Share(blocks=share, first=stage == 0, last=stage == p - 1),
            micro_batches=configuration.micro_batches,
            in_flight=in_flight(stage, p, configuration.micro_batches),
            recompute=configuration.recompute,
            stages=p,
        )
        found.append((stage * share, share * count, terms))
    return found


def _meeting(tables: CostTables, operators: Mapping[int, int], parameters: Mapping[str, int]) -> Pins:
    """What later stages must take over from the first:

    the makers of what blocks hand on, and parameters that stages share.
    """
    template = tables.template
    makers = {edge.producer for edge in template.edges if edge.kind == "loop"}
    shared = {name: at for name, at in parameters.items() if name not in template.own_parameters}
    return Pins(operators={at: operators[at] for at in makers if at in operators}, parameters=shared)


def _assembled_seconds(
    configuration: Configuration, tables: CostTables, choices: list[StageChoice], cluster: Cluster
) -> float:
    """Step time of all stages together: their problems once more, with one micro-batch and with none, give t and u."""
    per_part: list[float] = []
    per_step: list[float] = []
    for (_, _, terms), choice in zip(stage_kinds(configuration, tables.template), choices, strict=True):
        once = _busy(tables, replace(terms, micro_batches=0), choice, cluster)
        one = _busy(tables, replace(terms, micro_batches=1), choice, cluster)
        count = max(1, configuration.stages - 2) if len(per_part) == 1 and configuration.stages > 2 else 1
        per_part += [one - once] * count
        per_step += [once] * count
    return float(step_time(per_part, per_step, configuration.micro_batches))


def _busy(tables: CostTables, terms: StageTerms, choice: StageChoice, cluster: Cluster) -> float:
    problem: StageProblem = stage_problem(tables, terms, cluster, math.inf)
    taken = [choice.operators[at] for at in problem.operators] + [
        choice.parameters[name] for name in problem.parameters
    ]
    return problem.problem.evaluate(taken).time


def _plan(request: SearchRequest, prepared: OperatorGraph, blocks: BlockRun, best: _Found) -> Plan:
    """The winner as a plan, priced by the judge."""
    worst = max(best.solutions, key=lambda solution: solution.gap)
    plan = Plan(
        model=request.model,
        training=Training(
            global_batch=request.global_batch,
            micro_batches=best.configuration.micro_batches,
            precision=request.precision,
            optimizer=request.optimizer,
        ),
        cluster=ClusterReference(
            profile=request.cluster.name, digest=request.cluster.digest(), devices=request.cluster.devices
        ),
        mesh=best.tables.mesh,
        stages=stages_of(best.configuration.stages, best.tables.template.blocks),
        schedule="1f1b",
        recomputation="full" if best.configuration.recompute else "none",
        inputs=input_layouts(best.tables, best.choices),
        groups=groups_of(prepared, best.tables.template.blocks, best.tables, best.choices),
        prediction=Prediction.unknown(),
        provenance=Provenance(
            planner=PLANNER_VERSION,
            search=request.algorithm,
            status=worst.status,
            gap=0.0 if worst.status == "optimal" else float(f"{worst.gap:.3g}"),
        ),
    )
    return replace(plan, prediction=predict(bind(plan, request.graph, request.batch), request.cluster))


def _nothing_fits(request: SearchRequest, least: float) -> InfeasibleError:
    device = request.cluster.device
    needed = float(peak_memory(least, 0.0, 0.0, device))
    return InfeasibleError(
        f"{request.model.reference} does not fit on {request.cluster.devices} x {request.cluster.name}: the "
        "leanest plan needs"
        f" {needed / 2**30:.1f} GiB per device, {(needed - device.memory) / 2**30:.1f} GiB more than the "
        f"{device.memory / 2**30:.1f} GiB there are"
    )
