"""Without the all-to-all: redistributions of an all-gather and a slice, no exchange of rows, refusals by name."""

import itertools
from dataclasses import replace

import pytest

from planner.errors import PlanFileError, RequestError, StrategyError
from planner.plan.binding.bind import bind
from planner.plan.file import dump_plan, parse_plan
from planner.plan.prediction.predict import predict, stage_costs
from planner.sharding.layout import PARTIAL, REPLICATE, divides, parse_layout, shard
from planner.sharding.legality import legal_strategies
from planner.sharding.mesh import Mesh, build_mesh
from planner.sharding.redistribute import redistribution
from planner.sharding.rule import FactorKind
from planner.sharding.rules import rule_of
from planner.sharding.update import Update
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.search import search
from tests.distributed import plans
from tests.distributed.tasks_alltoall import without
from tests.unit.search.cases import cluster_of, request_of

SHAPE = (8, 8)


def kinds(mesh: Mesh, source: str, target: str) -> list[tuple[str, int]]:
    return [(step.kind, step.axis) for step in redistribution(SHAPE, mesh, parse_layout(source), parse_layout(target))]


def test_an_all_gather_and_a_slice_in_its_place() -> None:
    mesh = plans.mesh_of(2, 2)
    assert kinds(mesh, "S0,S1", "S0,R") == [("all_gather", 1)]
    assert kinds(mesh, "R,S0", "R,S1") == [("all_to_all", 1)]
    assert kinds(without(mesh, (1,)), "R,S0", "R,S1") == [("all_gather", 1), ("slice", 1)]
    assert kinds(without(mesh, (0,)), "R,S0", "R,S1") == [("all_to_all", 1)]


def test_every_layout_is_reached_without_it() -> None:
    mesh = without(plans.mesh_of(2, 2), (0, 1))
    placements = [REPLICATE, PARTIAL, shard(0), shard(1)]
    layouts = [one for one in itertools.product(placements, repeat=2) if divides(SHAPE, one, mesh.sizes)]
    for source, target in itertools.product(layouts, repeat=2):
        steps = redistribution(SHAPE, mesh, source, target)
        assert all(step.kind != "all_to_all" for step in steps)
        assert bool(steps) == (source != target)


def test_experts_exchange_no_rows() -> None:
    mesh, graph = plans.mesh_of(4), plans.traced("mixture")
    rules = [rule_of(graph, op) for op in graph.operators if op.op == "planner.experts.default"]
    for rule in rules:
        exchanges = {at for at, factor in enumerate(rule.factors) if factor.kind is FactorKind.EXCHANGE}
        assert any(exchanges & set(one) for one in legal_strategies(rule, mesh))
        assert not any(exchanges & set(one) for one in legal_strategies(rule, without(mesh, (0,))))
    assert rules


def test_a_plan_keeps_it_and_is_held_to_it() -> None:
    plan = plans.random_plan("llama", without(plans.mesh_of(2, 2), (1,)), 3)
    text = dump_plan(plan)
    assert text.count('"alltoall": false') == 1
    assert parse_plan(text).mesh == plan.mesh
    assert "alltoall" not in dump_plan(replace(plan, mesh=plans.mesh_of(2, 2)))


def test_a_plan_that_exchanges_rows_without_it_is_refused() -> None:
    graph = plans.traced("mixture")

    def exchange(name: str, rule: object, mesh: Mesh) -> tuple[int | None, ...]:
        factors = rule.factors  # type: ignore[attr-defined]
        return (next((at for at, factor in enumerate(factors) if factor.kind is FactorKind.EXCHANGE), None),)

    plan = plans.make_plan("mixture", plans.mesh_of(4), exchange, plans.store_zero1, plans.load_samples)  # type: ignore[arg-type]
    bind(plan, graph, plans.BATCH)
    with pytest.raises(StrategyError, match="axis0 has no all-to-all, with which 'e@b' exchanges rows"):
        bind(replace(plan, mesh=without(plan.mesh, (0,))), graph, plans.BATCH)


def test_what_is_made_of_it_is_refused_by_name() -> None:
    cluster = cluster_of("h100-80gb", 8)
    with pytest.raises(RequestError, match="rows of tables outside of the devices are exchanged by an all-to-all"):
        request_of("llama-4", cluster, 64, alltoall=False, placing="auto")
    plan = plans.random_plan("llama", without(plans.mesh_of(2, 2), (1,)), 3)
    update = Update(buckets="none", placed=(("*embed_tokens*", "host"),))
    placed = replace(plan, training=replace(plan.training, update=update))
    with pytest.raises(PlanFileError, match="exchanged by an all-to-all, which an axis of the mesh lacks"):
        bind(placed, plans.traced("llama"), plans.BATCH)


def test_all_axes_of_a_mesh_lack_it() -> None:
    assert not any(axis.alltoall for axis in build_mesh(cluster_of("h100-80gb", 8), (2, 4), alltoall=False).axes)
    assert build_mesh(cluster_of("h100-80gb", 8), (2, 4)).alltoall


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_search_without_it_has_none() -> None:
    cluster = cluster_of("h100-80gb", 8)
    for alltoall in (True, False):
        request = request_of("llama-4", cluster, 64, alltoall=alltoall, pinned=Pinned(context=2))
        plan = search(request).plan
        bound = bind(plan, request.graph, request.batch)
        sent = {charge.message.kind for cost in stage_costs(bound, cluster) for charge in cost.messages}
        assert ("all_to_all" in sent) == alltoall
        assert predict(bound, cluster).step_seconds == pytest.approx(plan.prediction.step_seconds)
