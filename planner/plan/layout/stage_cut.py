"""What each stage of a plan holds of the graph, in which layouts, and which values go from one stage to the next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from planner.errors import PlannerError
from planner.graph.operator_graph import OperatorGraph
from planner.plan.binding.bind import BoundPlan, stage_ends, stage_of_operators
from planner.plan.binding.slices import positional


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCut:
    """What one stage holds: its operators (with the constant ones that it computes for itself), the values that it gets
    from the stage before and gives to the stage after, and the parameters that it uses. A value that only later stages
    read is received and passed on all the same."""

    stage: int
    stages: int
    operators: tuple[int, ...]
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    parameters: frozenset[str]

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1


def cut_stage(bound: BoundPlan, stage: int) -> StageCut:
    """The part of a plan that one stage executes."""
    ends = stage_ends(bound)
    key = ("cut", ends, stage)
    if key not in bound.graph.derived:
        bound.graph.derived[key] = _cut(bound, ends, stage)
    return cast("StageCut", bound.graph.derived[key])


def _cut(bound: BoundPlan, ends: Sequence[int], stage: int) -> StageCut:
    graph, count = bound.graph, len(ends)
    begin, end = (0, *ends)[stage : stage + 2]
    varies = varying(graph)
    own = [at for at in range(begin, end) if varies[at]]
    own += _constants(graph, own, positional(bound.whole, graph))
    crossing = crossing_values(bound)
    used = {name for at in own for name in graph.operators[at].operands}
    return StageCut(
        stage=stage,
        stages=count,
        operators=tuple(sorted(own)),
        receives=crossing[stage],
        sends=crossing[stage + 1] if stage + 1 < count else (),
        parameters=frozenset(used & graph.parameter_names),
    )


def check_updates(bound: BoundPlan, cuts: Sequence[StageCut]) -> None:
    """Raise PlannerError where a stage reads a buffer that another stage changes: it would not get the new contents."""
    graph = bound.graph
    for buffer, content in graph.updates:
        writers = {cut.stage for cut in cuts if graph.producer[content] in cut.operators}
        readers = {cut.stage for cut in cuts for at in cut.operators if buffer in graph.operators[at].operands}
        if len(writers | readers) > 1:
            raise PlannerError(
                f"buffer '{buffer}' is changed in stage {min(writers)} and read in the stages {sorted(readers)}; plan"
                " this model with --pipeline 1"
            )


def varying(graph: OperatorGraph) -> tuple[bool, ...]:
    """Which operators make something that differs between steps."""
    if ("varying",) not in graph.derived:
        dependent = graph.data_dependent
        graph.derived["varying",] = tuple(not dependent.isdisjoint(op.results) for op in graph.operators)
    return cast("tuple[bool, ...]", graph.derived["varying",])


def _constants(graph: OperatorGraph, own: Sequence[int], given: frozenset[str]) -> list[int]:
    """Operators that the stage needs and whose results never change (masks, positions): it computes them itself, except
    those that every slice of the sequence is `given`."""
    found: set[int] = set()
    varies = varying(graph)
    wanted = [name for at in own for name in graph.operators[at].operands]
    while wanted:
        name = wanted.pop()
        at = None if name in given else graph.producer.get(name)
        if at is not None and not varies[at] and at not in found:
            found.add(at)
            wanted += graph.operators[at].operands
    return sorted(found)


def crossing_values(bound: BoundPlan) -> tuple[tuple[str, ...], ...]:
    """For each stage of a plan the values that it gets from the stage before: they are made before it, and read in it
    or in a later stage, to which it passes them on."""
    key = ("crossing", stage_ends(bound))
    if key not in bound.graph.derived:
        bound.graph.derived[key] = _crossing(bound.graph, stage_of_operators(bound), len(bound.plan.stages))
    return cast("tuple[tuple[str, ...], ...]", bound.graph.derived[key])


def _crossing(graph: OperatorGraph, stages: Mapping[int, int], count: int) -> tuple[tuple[str, ...], ...]:
    found: list[list[str]] = [[] for _ in range(count)]
    for at, op in enumerate(graph.operators):
        for name in op.results:
            if name is not None and name in graph.data_dependent:
                last = max((stages[use] for use in graph.consumers.get(name, ())), default=0)
                for stage in range(stages[at] + 1, last + 1):
                    found[stage].append(name)
    return tuple(tuple(names) for names in found)
