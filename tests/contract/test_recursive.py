"""The recursive search: legal, the same every time, exact on one axis, and never better than the exact search."""

import math
from dataclasses import replace

import pytest

from costmodels import usable_memory
from hardware_profiles import Cluster
from planner.sharding.layout import divides
from planner.sharding.legality import strategy_fault
from planner.sharding.mesh import Mesh, build_mesh
from planner.sharding.rescale import rescale_batch
from planner.sharding.rules import rule_of
from planner.sharding.stored import stored_fault
from planner.strategy_search.decomposition.cutting import cut
from planner.strategy_search.decomposition.setting import setting_of
from planner.strategy_search.engine.evaluation import Evaluation
from planner.strategy_search.engine.outcome import Outcome
from planner.strategy_search.engine.recursive import RecursivePlan, Task, level_sizes, plan_recursively
from planner.strategy_search.request.restriction import Fixed, OneAxisFree, Restriction
from planner.strategy_search.request.space import Configuration
from planner.strategy_search.tables.table_builder import TableBuilder
from tests.unit.search.cases import BATCH, cluster_of, template_of

SAMPLES = 24
MODELS = ("llama-2", "gpt-3", "residual-first", "perceptron", "mixture")


def task_of(model: str, cluster: Cluster, *, pipeline: int = 1, micro_batches: int = 2, sweeps: int = 3) -> Task:
    template = template_of(model)
    return Task(
        template=replace(template, graph=rescale_batch(template.graph, BATCH, SAMPLES // micro_batches)),
        cluster=cluster,
        configuration=Configuration(pipeline=pipeline, mesh=(), micro_batches=micro_batches),
        precision="fp32",
        optimizer="adamw",
        sweeps=sweeps,
    )


def six_per_node(devices: int) -> Cluster:
    cluster = cluster_of("h100-80gb", 8)
    node = replace(cluster.levels[0], fan_out=6)
    return replace(cluster, levels=(node, *cluster.levels[1:]), devices=devices)


def exact(task: Task, mesh: Mesh, capacity: float, restriction: Restriction | None = None) -> Outcome:
    """What the exact search finds on a mesh, among all candidates or some."""
    builder = TableBuilder(
        mesh=mesh, cluster=task.cluster, precision=task.precision, optimizer=task.optimizer, dominated=True
    )
    tables = builder.build(task.template, restriction)
    chain = cut(tables, task.cluster, recomputation=task.recomputation, stages=task.configuration.pipeline)
    return Evaluation(chain, setting_of(task.configuration, capacity)).run()


def check_legal(task: Task, plan: RecursivePlan) -> None:
    graph, mesh = task.template.graph, plan.mesh
    assert mesh.size * task.configuration.pipeline == task.cluster.devices
    for op, strategy in zip(graph.operators, plan.chosen.operators, strict=True):
        assert strategy_fault(rule_of(graph, op), strategy, mesh) is None, op.name
    for parameter in graph.parameters:
        stored = plan.chosen.parameters[parameter.name]
        assert stored_fault(stored) is None
        for layout in (stored.weight, stored.gradient, stored.state):
            assert len(layout) == len(mesh.axes)
            assert divides(graph.types[parameter.name].shape, layout, mesh.sizes)


def found(task: Task, capacity: float = math.inf) -> RecursivePlan:
    plan = plan_recursively(task, capacity)
    assert plan is not None
    return plan


@pytest.mark.cases(2, 4)
@pytest.mark.parametrize("devices", [1, 6, 12, 24, 48])
@pytest.mark.parametrize("model", ["llama-2", "perceptron"])
def test_any_number_of_devices(model: str, devices: int) -> None:
    task = task_of(model, six_per_node(devices))
    capacity = usable_memory(task.cluster.device)
    plan = found(task, capacity)
    check_legal(task, plan)
    assert math.isclose(exact(task, plan.mesh, capacity, plan.chosen).seconds, plan.seconds, rel_tol=1e-9)
    again = found(task, capacity)
    assert (again.mesh, again.chosen, again.seconds) == (plan.mesh, plan.chosen, plan.seconds)


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, 16])
@pytest.mark.parametrize("model", MODELS)
def test_never_better_than_the_exact_search_on_the_same_mesh(model: str, devices: int) -> None:
    task = task_of(model, cluster_of("h100-80gb", devices))
    free = found(task)
    peak = max(rank.peak for rank in exact(task, free.mesh, math.inf, free.chosen).ranks)
    for capacity in (math.inf, peak * 0.6):
        plan = plan_recursively(task, capacity)
        if plan is not None and len(plan.mesh.axes) <= 2:
            check_legal(task, plan)
            assert plan.seconds >= exact(task, plan.mesh, capacity).bound * (1 - 1e-9)


@pytest.mark.cases(4, 1)
@pytest.mark.parametrize("model", MODELS)
def test_exact_where_there_is_one_axis(model: str) -> None:
    task = task_of(model, cluster_of("h100-80gb", 2))
    plan = found(task)
    assert math.isclose(plan.seconds, exact(task, build_mesh(task.cluster, (2,)), math.inf).seconds, rel_tol=1e-9)


@pytest.mark.parametrize("model", ["gpt-3", "perceptron"])
def test_sweeps_never_make_it_slower(model: str) -> None:
    cluster = cluster_of("h100-80gb", 16)
    times = [found(task_of(model, cluster, sweeps=sweeps)).seconds for sweeps in (0, 3)]
    assert times[1] <= times[0] * (1 + 1e-9)


def test_ranks_of_a_pipeline() -> None:
    task = task_of("llama-4", cluster_of("h100-80gb", 16), pipeline=4)
    plan = found(task, usable_memory(task.cluster.device))
    check_legal(task, plan)
    assert plan.mesh.size == 4


def test_nothing_fits() -> None:
    assert plan_recursively(task_of("llama-2", cluster_of("h100-80gb", 8)), 1000.0) is None
    assert plan_recursively(task_of("llama-2", cluster_of("h100-80gb", 1)), 1000.0) is None


def test_levels() -> None:
    cluster = cluster_of("h100-80gb", 64)
    assert level_sizes(64, cluster) == (8, 8)
    assert level_sizes(4, cluster) == (4,)
    assert level_sizes(1, cluster) == ()
    assert level_sizes(12, cluster) == (3, 4)
    assert level_sizes(48, six_per_node(48)) == (8, 6)
    starts = task_of("llama-2", six_per_node(48)).starts()
    assert starts == ((2, 2, 2, 3, 2), (8, 6))


@pytest.mark.parametrize("sizes", [(2, 2), (2, 2, 2)])
def test_restricted_tables_are_part_of_all(sizes: tuple[int, ...]) -> None:
    """With one axis free, and with nothing free, tables hold the prices that they hold among all candidates."""
    task = task_of("llama-2", cluster_of("h100-80gb", 8))
    graph = task.template.graph
    mesh = build_mesh(task.cluster, sizes)
    builder = TableBuilder(mesh=mesh, cluster=task.cluster, precision="fp32", optimizer="adamw", dominated=True)
    every = builder.build(task.template)
    fixed = Fixed(
        operators=tuple(table.candidates.strategies[-1] for table in every.operators),
        parameters={table.name: table.stored[len(table.stored) // 2] for table in every.parameters},
    )
    for among in (fixed, OneAxisFree(fixed=fixed, axis=0), OneAxisFree(fixed=fixed, axis=len(sizes) - 1)):
        some = builder.build(task.template, among)
        places = [
            [whole.candidates.strategies.index(strategy) for strategy in part.candidates.strategies]
            for whole, part in zip(every.operators, some.operators, strict=True)
        ]
        for at, (whole, part) in enumerate(zip(every.operators, some.operators, strict=True)):
            assert list(whole.prices.forward[places[at]]) == list(part.prices.forward), graph.operators[at].name
            assert list(whole.kept[places[at]]) == list(part.kept)
        for edge, restricted in zip(every.edges, some.edges, strict=True):
            rows, columns = places[edge.edge.producer], places[edge.edge.consumer]
            for kind in ("forward", "backward", "kept"):
                assert (getattr(edge, kind)[rows][:, columns] == getattr(restricted, kind)).all()
        for parameter, left in zip(every.parameters, some.parameters, strict=True):
            rows = [parameter.stored.index(stored) for stored in left.stored]
            assert (parameter.prices.synchronisation[rows] == left.prices.synchronisation).all()
            for use, same in zip(parameter.uses, left.uses, strict=True):
                for kind in ("gather", "reduce", "gathered"):
                    assert (getattr(use, kind)[rows][:, places[use.consumer]] == getattr(same, kind)).all()
