"""The problem of one pipeline stage: cost tables weighed by what the stage holds and how the step is run.

The time of a choice is what the stage is busy in one step, m t + u: m micro-batches of forward, backward, recomputation
and communication, and once a step gradients and optimizer. The memory of a choice is everything the stage keeps:
parameters, and activations for each of the micro-batches in flight.

With full recomputation a block keeps only what flows into it; what its operators keep, and the weights that they
gather, exist for one block at a time.
There the first stage is charged a little too much: one block stands for the first, which reads what comes before the
blocks, and for the others, which read the block before them, so redistributed copies of both count although no block
has both.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hardware_profiles import Cluster
from planner.plan.predict import tied_seconds, transfer_seconds
from planner.search.cost_table import CostTables, EdgeTable, OperatorTable, ParameterTable, UseTable
from planner.search.problem import Edge, Problem, Variable
from planner.search.template import Share, Template, ValueEdge
from planner.sharding.layout import local_fraction

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTerms:
    """How a stage is run: what it holds, micro-batches per step and in flight, recomputation, number of stages."""

    share: Share
    micro_batches: int
    in_flight: int
    recompute: bool
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Candidates decided already: of operators (position in the template) and of parameters (name)."""

    operators: Mapping[int, int]
    parameters: Mapping[str, int]


NO_PINS = Pins(operators={}, parameters={})


@dataclass(frozen=True, kw_only=True, eq=False)
class StageProblem:
    """A problem and what its variables stand for: positions of operators of the template, names of parameters."""

    problem: Problem
    operators: tuple[int, ...]
    parameters: tuple[str, ...]

    def choices(self, choice: Sequence[int]) -> tuple[dict[int, int], dict[str, int]]:
        """Candidate of every operator and of every parameter."""
        count = len(self.operators)
        return (
            dict(zip(self.operators, choice[:count], strict=True)),
            dict(zip(self.parameters, choice[count:], strict=True)),
        )


def stage_problem(
    tables: CostTables, terms: StageTerms, cluster: Cluster, memory_limit: float, pins: Pins = NO_PINS
) -> StageProblem:
    """The problem of one stage. `pins` fixes the candidates on which stages must agree."""
    template = tables.template
    held = [template.held(index, terms.share) for index in range(len(tables.operators))]
    operators = tuple(index for index, count in enumerate(held) if count)
    place = {index: position for position, index in enumerate(operators)}
    carried = _carried(tables, terms, cluster)
    variables = [
        _operator_variable(tables, index, held[index], terms, carried.get(index), pins.operators.get(index))
        for index in operators
    ]
    counting = [
        table
        for table in tables.edges
        if terms.share.times(table.edge.kind) and table.edge.producer in place and table.edge.consumer in place
    ]
    edges = [_edge(tables, table, terms, place) for table in counting if table.edge.producer != table.edge.consumer]
    for table in counting:
        if table.edge.producer == table.edge.consumer:  # reads its own result of the block before
            at = place[table.edge.producer]
            variables[at] = _with_own_edge(variables[at], *_weighed(tables, table, terms))
    parameters = []
    for parameter in tables.parameters:
        uses = [use for use in parameter.uses if held[use.consumer]]
        if uses:
            position = len(variables)
            times = terms.share.blocks if parameter.name in template.own_parameters else 1
            pin = pins.parameters.get(parameter.name)
            variables.append(_parameter_variable(tables, parameter, times, terms, cluster, pin))
            edges += [_use(tables, use, held[use.consumer], terms, place[use.consumer], position) for use in uses]
            parameters.append(parameter.name)
    problem = Problem(variables=tuple(variables), edges=tuple(edges), memory_limit=memory_limit)
    return StageProblem(problem=problem, operators=operators, parameters=tuple(parameters))


def _again(tables: CostTables, index: int, terms: StageTerms) -> bool:
    return terms.recompute and tables.template.in_block(index)


def _moves_again(tables: CostTables, index: int, terms: StageTerms) -> bool:
    """Whether the operands of an operator are moved once more when its block is recomputed."""
    template = tables.template
    return _again(tables, index, terms) and index - template.blocks.start < template.replay.moves


def _operator_variable(
    tables: CostTables, index: int, held: int, terms: StageTerms, carried: tuple[Array, Array] | None, pin: int | None
) -> Variable:
    table: OperatorTable = tables.operators[index]
    prices = table.prices
    again = _again(tables, index, terms)
    works = again and index - tables.template.blocks.start < tables.template.replay.works
    forward = prices.forward + prices.inner_forward
    seconds = forward * (2 if works else 1) + prices.backward + prices.inner_backward
    time = seconds * (held * terms.micro_batches)
    memory = table.kept * (1 if again else held * terms.in_flight)
    if carried is not None:
        time, memory = time + carried[0], memory + carried[1]
    name = tables.template.graph.operators[index].name
    return Variable(name=name, time=_only(time, pin), memory=memory, transient=table.transient)


def _only(time: Array, pin: int | None) -> Array:
    """Times with every candidate but the pinned one forbidden."""
    return time if pin is None else np.where(np.arange(len(time)) == pin, time, np.inf)


def _with_own_edge(variable: Variable, time: Array, memory: Array) -> Variable:
    return Variable(
        name=variable.name,
        time=variable.time + np.diagonal(time),
        memory=variable.memory + np.diagonal(memory),
        transient=variable.transient,
    )


def _carried(tables: CostTables, terms: StageTerms, cluster: Cluster) -> dict[int, tuple[Array, Array]]:
    """Seconds and bytes that fall to the makers of values which cross from block to block, or into the blocks.

    Crossing to or from another stage takes a transfer, and one back for the gradient; a stage keeps what it receives,
    and a recomputed block what flows into it; what only the next block, or only the rest, keeps for its gradients stays
    with the maker.
    """
    template, share = tables.template, terms.share
    graph = template.graph
    found: dict[int, tuple[Array, Array]] = {}
    for edge in _once_each(template):
        nbytes = tables.result_bytes[edge.name]
        graded = edge.name in graph.differentiable
        time, memory = found.get(edge.producer, (np.zeros_like(nbytes), np.zeros_like(nbytes)))
        if terms.recompute and graded:
            memory = memory + nbytes * (terms.in_flight * share.times(edge.kind))
        crossings = (0 if share.first else 1) + (1 if graded and not share.last else 0)
        if edge.kind == "loop" and crossings and edge.name in graph.data_dependent:
            one = np.array([transfer_seconds(float(n), tables.mesh.size, cluster) for n in nbytes])
            time = time + one * (crossings * terms.micro_batches)
            memory = memory + nbytes * (0 if share.first or terms.recompute else terms.in_flight)
        if edge.kind == "loop":
            keepers = (share.blocks - int(share.last)) * (edge.name in template.kept_for_next)
            keepers += int(share.last and edge.name in template.kept_for_rest)
            memory = memory + nbytes * (min(1, keepers) if terms.recompute else keepers * terms.in_flight)
        found[edge.producer] = (time, memory)
    return found


def _once_each(template: Template) -> Iterator[ValueEdge]:
    """One edge for every value and way into the blocks; what all blocks read enters the first only once."""
    every = {edge.name for edge in template.edges if edge.kind == "every"}
    seen: set[tuple[str, str]] = set()
    for edge in template.edges:
        known = (edge.name, edge.kind) in seen or (edge.kind == "enter" and edge.name in every)
        if edge.kind in ("enter", "every", "loop") and not known:
            seen.add((edge.name, edge.kind))
            yield edge


def _weighed(tables: CostTables, table: EdgeTable, terms: StageTerms) -> tuple[Array, Array]:
    """Seconds and bytes of an edge as often as it counts."""
    again = _again(tables, table.edge.consumer, terms)
    count = terms.share.times(table.edge.kind)
    moves = _moves_again(tables, table.edge.consumer, terms)
    time = (table.forward * (2 if moves else 1) + table.backward) * (count * terms.micro_batches)
    return time, table.kept * (1 if again else count * terms.in_flight)


def _edge(tables: CostTables, table: EdgeTable, terms: StageTerms, place: Mapping[int, int]) -> Edge:
    first, second = place[table.edge.producer], place[table.edge.consumer]
    time, memory = _weighed(tables, table, terms)
    if first < second:
        return Edge(first=first, second=second, time=time, memory=memory)
    return Edge(first=second, second=first, time=time.T, memory=memory.T)


def _use(tables: CostTables, use: UseTable, held: int, terms: StageTerms, consumer: int, parameter: int) -> Edge:
    """Parameters come after all operators, so the tables are turned round.

    The weight is gathered once more where the backward pass needs it, or the block is recomputed; a recomputed block
    keeps what it has gathered until its backward pass is done.
    """
    again = _again(tables, use.consumer, terms)
    twice = _moves_again(tables, use.consumer, terms) if again else use.needed
    time = (use.gather * (2 if twice else 1) + use.reduce) * (held * terms.micro_batches)
    memory = use.gathered if again and use.needed else np.zeros_like(time)
    return Edge(first=consumer, second=parameter, time=time.T, memory=memory.T)


def _parameter_variable(
    tables: CostTables, parameter: ParameterTable, times: int, terms: StageTerms, cluster: Cluster, pin: int | None
) -> Variable:
    prices = parameter.prices
    once = prices.synchronisation + prices.update + prices.gather + _tied(tables, parameter, terms, cluster)
    memory = prices.weight + prices.gradient + prices.state
    time = _only((once + prices.accumulation * terms.micro_batches) * times, pin)
    return Variable(name=parameter.name, time=time, memory=memory * times, transient=np.zeros_like(memory))


def _tied(tables: CostTables, parameter: ParameterTable, terms: StageTerms, cluster: Cluster) -> Array:
    """Summing the gradient of a parameter that the first and the last stage both hold."""
    template = tables.template
    before = any(use.consumer < template.blocks.start for use in parameter.uses)
    after = any(use.consumer >= template.blocks.start + template.blocks.period for use in parameter.uses)
    trainable = parameter.name in template.graph.differentiable
    if terms.stages < 2 or not (before and after and trainable):
        return np.zeros(len(parameter.stored))
    numel = template.graph.types[parameter.name].numel
    shares = [local_fraction(stored.state, tables.mesh.sizes) for stored in parameter.stored]
    return np.array(
        [tied_seconds(4.0 * numel * share, terms.stages - 1, tables.mesh.size, cluster) for share in shares]
    )
