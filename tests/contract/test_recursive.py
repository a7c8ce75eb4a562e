"""The recursive search: legal, the same every time, exact on one axis, and never better than the exact solver."""

import math
from dataclasses import replace

import pytest

from hardware_profiles import Cluster
from planner.search.cost_table import TableBuilder
from planner.search.problem import Evaluation, Problem
from planner.search.recursive import RecursivePlan, Setting, level_sizes, plan_recursively
from planner.search.restriction import Fixed, OneAxisFree, Restriction
from planner.search.solvers import SOLVERS
from planner.search.stage_problem import stage_problem
from planner.sharding.layout import divides
from planner.sharding.mesh import Mesh, build_mesh
from planner.sharding.rescale import rescale_batch
from planner.sharding.rule import strategy_fault
from planner.sharding.rules import rule_of
from planner.sharding.stored import stored_fault
from tests.unit.search.cases import BATCH, cluster_of, template_of

SAMPLES = 24
MODELS = ("llama-2", "gpt-3", "residual-first", "perceptron")


def setting_of(model: str, cluster: Cluster, *, stages: int = 1, micro_batches: int = 2, sweeps: int = 3) -> Setting:
    template = template_of(model)
    return Setting(
        template=replace(template, graph=rescale_batch(template.graph, BATCH, SAMPLES // micro_batches)),
        cluster=cluster,
        stages=stages,
        micro_batches=micro_batches,
        precision="fp32",
        optimizer="adamw",
        sweeps=sweeps,
    )


def six_per_node(devices: int) -> Cluster:
    cluster = cluster_of("h100-80gb", 8)
    node = replace(cluster.levels[0], fan_out=6)
    return replace(cluster, levels=(node, *cluster.levels[1:]), devices=devices)


def problem_of(
    setting: Setting, mesh: Mesh, recompute: bool, limit: float, restriction: Restriction | None = None
) -> Problem:
    """The stage problem on a mesh, of all candidates or of some."""
    builder = TableBuilder(mesh=mesh, cluster=setting.cluster, precision=setting.precision, optimizer=setting.optimizer)
    tables = builder.build(setting.template, restriction)
    return stage_problem(tables, setting.terms(recompute), setting.cluster, limit).problem


def priced(setting: Setting, plan: RecursivePlan) -> Evaluation:
    """What a plan costs in tables that hold nothing else."""
    problem = problem_of(setting, plan.mesh, plan.recompute, math.inf, plan.chosen)
    assert set(problem.sizes) == {1}
    return problem.evaluate([0] * len(problem.sizes))


def check_legal(setting: Setting, plan: RecursivePlan) -> None:
    graph, mesh = setting.template.graph, plan.mesh
    assert mesh.size * setting.stages == setting.cluster.devices
    for op, strategy in zip(graph.operators, plan.chosen.operators, strict=True):
        assert strategy_fault(rule_of(graph, op), strategy, mesh) is None, op.name
    for parameter in graph.parameters:
        stored = plan.chosen.parameters[parameter.name]
        assert stored_fault(stored) is None
        for layout in (stored.weight, stored.gradient, stored.state):
            assert len(layout) == len(mesh.axes)
            assert divides(graph.types[parameter.name].shape, layout, mesh.sizes)


def found(setting: Setting, limit: float | None = None) -> RecursivePlan:
    plan = plan_recursively(setting, limit)
    assert plan is not None
    return plan


@pytest.mark.parametrize("devices", [1, 6, 12, 24, 48])
@pytest.mark.parametrize("model", ["llama-2", "perceptron"])
def test_any_number_of_devices(model: str, devices: int) -> None:
    setting = setting_of(model, six_per_node(devices))
    plan = found(setting)
    check_legal(setting, plan)
    assert math.isclose(priced(setting, plan).time, plan.evaluation.time, rel_tol=1e-9)
    again = found(setting)
    assert (again.mesh, again.chosen, again.evaluation) == (plan.mesh, plan.chosen, plan.evaluation)


@pytest.mark.parametrize("devices", [8, 16])
@pytest.mark.parametrize("model", MODELS)
def test_never_better_than_the_exact_solver_on_the_same_mesh(model: str, devices: int) -> None:
    setting = setting_of(model, cluster_of("h100-80gb", devices))
    free = found(setting)
    short = plan_recursively(setting, free.evaluation.peak * 0.6)
    for plan, limit in ((free, math.inf), (short, free.evaluation.peak * 0.6)):
        if plan is not None and len(plan.mesh.axes) <= 2:
            check_legal(setting, plan)
            assert plan.evaluation.peak <= limit * (1 + 1e-9)
            best = SOLVERS["dynamic_programming"](problem_of(setting, plan.mesh, plan.recompute, limit))
            assert best.evaluation is not None
            assert plan.evaluation.time >= best.evaluation.time * (1 - 1e-9)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("share", [math.inf, 0.8])
def test_exact_where_there_is_one_axis(model: str, share: float) -> None:
    setting = setting_of(model, cluster_of("h100-80gb", 2))
    limit = found(setting, 1e15).evaluation.peak * share
    plan = plan_recursively(setting, limit)
    mesh, times = build_mesh(setting.cluster, (2,)), []
    for recompute in (False, True) if setting.template.blocks.count else (False,):
        solution = SOLVERS["dynamic_programming"](problem_of(setting, mesh, recompute, limit))
        times += [solution.evaluation.time] if solution.evaluation else []
    assert (plan is None) == (not times)
    if plan is not None:
        assert plan.mesh == mesh
        assert math.isclose(plan.evaluation.time, min(times), rel_tol=1e-9)


@pytest.mark.parametrize("model", ["gpt-3", "perceptron"])
def test_sweeps_never_make_it_slower(model: str) -> None:
    cluster = cluster_of("h100-80gb", 16)
    limit = found(setting_of(model, cluster)).evaluation.peak * 0.7
    plans = [plan_recursively(setting_of(model, cluster, sweeps=sweeps), limit) for sweeps in (0, 1, 3)]
    times = [math.inf if plan is None else plan.evaluation.time for plan in plans]
    assert times[0] * (1 + 1e-9) >= times[1]
    assert times[1] * (1 + 1e-9) >= times[2]


def test_stages_of_a_pipeline() -> None:
    setting = setting_of("llama-4", cluster_of("h100-80gb", 16), stages=4)
    plan = found(setting)
    check_legal(setting, plan)
    assert plan.mesh.size == 4


def test_nothing_fits() -> None:
    assert plan_recursively(setting_of("llama-2", cluster_of("h100-80gb", 8)), 1000.0) is None
    assert plan_recursively(setting_of("llama-2", cluster_of("h100-80gb", 1)), 1000.0) is None


def test_levels() -> None:
    cluster = cluster_of("h100-80gb", 64)
    assert level_sizes(64, cluster) == (8, 8)
    assert level_sizes(4, cluster) == (4,)
    assert level_sizes(1, cluster) == ()
    assert level_sizes(12, cluster) == (3, 4)
    assert level_sizes(48, six_per_node(48)) == (8, 6)
    starts = setting_of("llama-2", six_per_node(48)).starts()
    assert starts == ((2, 2, 2, 3, 2), (8, 6))


@pytest.mark.parametrize("sizes", [(2, 2), (2, 2, 2)])
def test_restricted_tables_are_part_of_all(sizes: tuple[int, ...]) -> None:
    """With one axis free, and with nothing free, tables hold the prices that they hold among all candidates."""
    setting = setting_of("llama-2", cluster_of("h100-80gb", 8))
    graph = setting.template.graph
    mesh = build_mesh(setting.cluster, sizes)
    builder = TableBuilder(mesh=mesh, cluster=setting.cluster, precision="fp32", optimizer="adamw")
    every = builder.build(setting.template)
    fixed = Fixed(
        operators=tuple(table.candidates.strategies[-1] for table in every.operators),
        parameters={table.name: table.stored[len(table.stored) // 2] for table in every.parameters},
    )
    for among in (fixed, OneAxisFree(fixed=fixed, axis=0), OneAxisFree(fixed=fixed, axis=len(sizes) - 1)):
        some = builder.build(setting.template, among)
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
