"""One configuration solved: a problem for every kind of stage, all meeting in one layout.

    stage 0  ──layout L──>  stage 1  ──L──>  ...  ──L──>  stage p-1
    (embedding, n blocks)   (n blocks)                    (n blocks, head, loss)

The leader is solved freely and its choice of L is pinned in the others; where they cannot follow within their memory,
the last stage leads instead. Each stage's answer is exact for the layout it is given; the choice of L is the leader's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from costmodels import in_flight, step_time, usable_memory
from hardware_profiles import Cluster
from planner.search.assemble import StageChoice
from planner.search.cost_table import CostTables, TableBuilder
from planner.search.problem import Solution
from planner.search.request import SearchRequest
from planner.search.solvers import SOLVERS
from planner.search.space import Bounds, Configuration
from planner.search.stage_problem import NO_PINS, Pins, StageProblem, StageTerms, stage_problem
from planner.search.template import Share, Template
from planner.sharding.mesh import build_mesh
from planner.sharding.rescale import rescale_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A configuration that fits: its step time and what was chosen for every kind of stage."""

    configuration: Configuration
    seconds: float
    tables: CostTables
    choices: tuple[StageChoice, ...]
    solutions: tuple[Solution, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKind:
    """Equal stages of a pipeline: the blocks that they hold together, how many stages they are, how one is run."""

    first_block: int
    blocks: int
    count: int
    terms: StageTerms


def stage_kinds(configuration: Configuration, template: Template) -> list[StageKind]:
    """The first stage, those between, the last.

    Those between run as the second does, which holds the most micro-batches of them.
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
        found.append(StageKind(first_block=stage * share, blocks=share * count, count=count, terms=terms))
    return found


def _meeting(tables: CostTables, operators: Mapping[int, int], parameters: Mapping[str, int]) -> Pins:
    """What other stages must take over: the makers of what blocks hand on, and parameters that stages share."""
    template = tables.template
    makers = {edge.producer for edge in template.edges if edge.kind == "loop"}
    shared = {name: at for name, at in parameters.items() if name not in template.own_parameters}
    return Pins(operators={at: operators[at] for at in makers if at in operators}, parameters=shared)


def assembled_seconds(
    configuration: Configuration, tables: CostTables, choices: Sequence[StageChoice], cluster: Cluster
) -> float:
    """Step time of all stages together: their problems once more, with one micro-batch and with none, give t and u."""
    per_part: list[float] = []
    per_step: list[float] = []
    for kind, choice in zip(stage_kinds(configuration, tables.template), choices, strict=True):
        once = _busy(tables, replace(kind.terms, micro_batches=0), choice, cluster)
        one = _busy(tables, replace(kind.terms, micro_batches=1), choice, cluster)
        per_part += [one - once] * kind.count
        per_step += [once] * kind.count
    return float(step_time(per_part, per_step, configuration.micro_batches))


def _busy(tables: CostTables, terms: StageTerms, choice: StageChoice, cluster: Cluster) -> float:
    problem: StageProblem = stage_problem(tables, terms, cluster, math.inf)
    taken = [choice.operators[at] for at in problem.operators] + [
        choice.parameters[name] for name in problem.parameters
    ]
    return problem.problem.evaluate(taken).time


@dataclass(kw_only=True)
class Engine:
    """Solves configurations; keeps the table builder of each mesh. Use it in `search`."""

    request: SearchRequest
    template: Template
    limits: Bounds

    def __post_init__(self) -> None:
        self._builders: dict[tuple[int, ...], TableBuilder] = {}
        self._last: tuple[tuple[tuple[int, ...], int], CostTables] | None = None
        self._scaled: dict[int, Template] = {}

    def attempt(self, configuration: Configuration, upper_bound: float) -> Found | float | None:
        """A solution, or the least bytes that would be needed, or None where it cannot beat the upper bound."""
        request = self.request
        room = usable_memory(request.cluster.device)
        needed = self.limits.device_bytes(
            configuration, request.cluster.devices, request.global_batch, self.template.blocks.count
        )
        if needed > room:
            return needed
        tables = self._tables(configuration)
        kinds = stage_kinds(configuration, self.template)
        least = math.inf
        for leader in dict.fromkeys((0, len(kinds) - 1)):
            outcome = self._led_by(leader, kinds, tables, upper_bound)
            if not isinstance(outcome, float):
                return None if outcome is None else self._found(configuration, tables, outcome)
            least = min(least, outcome)
        return least

    def _led_by(
        self, leader: int, kinds: list[StageKind], tables: CostTables, upper_bound: float
    ) -> list[tuple[StageChoice, Solution]] | float | None:
        """Solve all kinds of stages; the leader is free, the others meet it in the layouts that it chose."""
        solve = SOLVERS[self.request.algorithm]
        room = usable_memory(self.request.cluster.device)
        solved: dict[int, tuple[StageChoice, Solution]] = {}
        pins = NO_PINS
        for index in sorted(range(len(kinds)), key=lambda index: index != leader):
            kind = kinds[index]
            problem = stage_problem(tables, kind.terms, self.request.cluster, room, pins)
            solution = solve(problem.problem, upper_bound=upper_bound)
            if solution.choice is None:
                return solution.least_memory if solution.status == "infeasible" else None
            operators, parameters = problem.choices(solution.choice)
            choice = StageChoice(
                first_block=kind.first_block, blocks=kind.blocks, operators=operators, parameters=parameters
            )
            solved[index] = (choice, solution)
            pins = _meeting(tables, operators, parameters) if pins is NO_PINS else pins
        return [solved[index] for index in range(len(kinds))]

    def _found(
        self, configuration: Configuration, tables: CostTables, solved: list[tuple[StageChoice, Solution]]
    ) -> Found:
        choices = tuple(choice for choice, _ in solved)
        return Found(
            configuration=configuration,
            seconds=assembled_seconds(configuration, tables, choices, self.request.cluster),
            tables=tables,
            choices=choices,
            solutions=tuple(solution for _, solution in solved),
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
