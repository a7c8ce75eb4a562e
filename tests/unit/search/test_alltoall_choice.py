"""Which links have the all-to-all: inside a node, and the best of all ways by search."""

from dataclasses import replace
from pathlib import Path

import pytest

import planner
from hardware_profiles import Cluster
from planner.errors import LimitError, PlanFileError, RequestError
from planner.plan.compare.repricing import repriced
from planner.plan.file import dump_plan, load_plan, parse_plan
from planner.report.command import command_of
from planner.sharding.mesh import NODE, build_mesh
from planner.strategy_search.analysis.advice import changes
from planner.strategy_search.analysis.around import request_for
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.result import SearchResult
from planner.strategy_search.search import search
from planner.strategy_search.variants import best_of_variants, variants_of
from tests.distributed import plans
from tests.refusals import refused
from tests.unit.search.cases import cluster_of, request_of


def has(cluster: Cluster, *sizes: int) -> list[bool]:
    return [axis.alltoall for axis in build_mesh(cluster, sizes, alltoall=NODE).axes]


def test_axes_inside_a_node_have_it() -> None:
    cluster = cluster_of("h100-80gb", 32)  # nodes of 8
    assert has(cluster, 4, 8) == [False, True]
    assert has(cluster, 2, 2, 8) == [False, False, True]
    assert has(cluster, 8, 2, 2) == [False, True, True]
    assert has(cluster, 16) == [False]
    assert has(cluster, 8) == [True]


def test_a_plan_is_searched_again_for_the_same_links() -> None:
    """By `plan run --elastic`, `plan replan`, `explain` and `report`."""
    cluster, graph = cluster_of("h100-80gb", 32), plans.traced("llama")
    for way in (True, NODE, False):
        mesh = build_mesh(cluster, (4, 8), alltoall=way)
        plan = plans.hand_plan("zero1", "llama", mesh, samples=32)
        assert request_for(plan, graph, plans.BATCH, cluster).alltoall == way
        assert (
            request_for(replace(plan, mesh=build_mesh(cluster, (1, 8))), graph, plans.BATCH, cluster).alltoall is True
        )


def test_a_plan_inside_a_node_says_which_links_it_was_made_for(tmp_path: Path) -> None:
    """Its axes all have the all-to-all, and on two nodes one of them would not."""
    one, two, graph = cluster_of("h100-80gb", 8), cluster_of("h100-80gb", 16), plans.traced("llama")
    plan = search(request_of("llama-2", one, 64, alltoall=NODE, pinned=Pinned(mesh=(8,), pipeline=1))).plan
    assert plan.mesh.alltoall
    assert plan.alltoall == NODE
    assert "--alltoall-on node" in command_of(plan)
    saved = load_plan(planner.save(plan, tmp_path / "plan.json"))
    assert saved == plan
    assert request_for(saved, graph, plans.BATCH, two).alltoall == NODE
    free = search(request_of("llama-2", one, 64, pinned=Pinned(mesh=(8,), pipeline=1))).plan
    assert "alltoall" not in dump_plan(free)
    assert request_for(free, graph, plans.BATCH, two).alltoall is True


def test_a_longer_axis_that_leaves_the_node_loses_it() -> None:
    one, two = cluster_of("h100-80gb", 8), cluster_of("h100-80gb", 16)
    asked = request_of("llama-2", one, 64, pinned=Pinned(data=8, pipeline=1))
    plan = search(asked).plan
    assert repriced(plan, asked.graph, asked.batch, two).plan.mesh.alltoall
    assert not repriced(replace(plan, alltoall=NODE), asked.graph, asked.batch, two).plan.mesh.alltoall
    assert repriced(replace(plan, alltoall=NODE), asked.graph, asked.batch, one).plan.mesh == plan.mesh


def test_links_and_axes_that_contradict_each_other_are_refused() -> None:
    plan = plans.hand_plan("zero1", "llama", build_mesh(cluster_of("h100-80gb", 8), (8,)), samples=32)
    with refused(PlanFileError, "alltoall", "'none'", "axis0"):
        parse_plan(dump_plan(replace(plan, alltoall=False)))
    text = dump_plan(replace(plan, alltoall=NODE)).replace('"alltoall": "node"', '"alltoall": "rack"')
    with refused(PlanFileError, "alltoall", "node"):
        parse_plan(text)
    without = build_mesh(cluster_of("h100-80gb", 8), (8,), alltoall=False)
    kept = parse_plan(dump_plan(replace(plan, mesh=without, alltoall=False)))
    assert kept.alltoall is False
    assert kept.links_with_alltoall is False


def test_gathers_and_buckets_of_a_plan_are_searched_again_but_for_buckets_that_somebody_named() -> None:
    cluster, graph = cluster_of("h100-80gb", 32), plans.traced("llama")
    plan = plans.hand_plan("zero1", "llama", build_mesh(cluster, (4, 8)), samples=32)
    named, owned = ("*.mlp.*", 1 << 20), "parameters"
    for buckets, kept in ((1 << 20, "auto"), ("none", "auto"), ((named,), (named,))):
        update = replace(plan.training.update, gathers="each", buckets=buckets, zero_by=owned)
        given = replace(plan, training=replace(plan.training, update=update))
        again = request_for(given, graph, plans.BATCH, cluster).update
        assert (again.gathers, again.buckets, again.zero_by) == ("auto", kept, owned)


def test_auto_is_every_way_that_can_be_had() -> None:
    asked = {"alltoall": "auto"}
    many, one = cluster_of("h100-80gb", 16), cluster_of("h100-80gb", 8)
    assert [r.alltoall for r in variants_of(request_of("llama-4", many, 64, **asked))] == [True, NODE, False]
    assert [r.alltoall for r in variants_of(request_of("llama-4", one, 64, **asked))] == [True, False]
    experts = request_of("mixture", one, 64, pinned=Pinned(expert=2), **asked)
    assert [r.alltoall for r in variants_of(experts)] == [True]


def test_another_word_is_refused() -> None:
    with refused(RequestError, "alltoall", "pod", "node", "auto"):
        request_of("llama-4", cluster_of("h100-80gb", 8), 64, alltoall="pod")


def test_what_would_fit_is_said_of_the_first_way() -> None:
    asked = request_of("perceptron", cluster_of("h100-80gb", 8), 8, alltoall="auto", memory_limit=2e8)
    found = changes(asked)
    assert "--memory-limit left out" in [change.text for change in found]
    assert all(change.seconds is not None for change in found)


def test_a_way_that_the_time_left_out_is_said() -> None:
    """A search of one of the ways that was stopped, or found nothing in its time: the others may not be the best."""
    asked = request_of("llama-1", cluster_of("h100-80gb", 2), 3, padding="auto")
    found = search(replace(asked, padding="given"))
    first, *others = variants_of(asked)
    assert others

    def in_time(one: SearchRequest) -> SearchResult:
        return found

    def too_late(one: SearchRequest) -> SearchResult:
        if one != first:
            raise LimitError("no time is left", by="time")
        return found

    def stopped(one: SearchRequest) -> SearchResult:
        return found if one == first else found.cut_short("memory")

    for solve, by in ((in_time, None), (too_late, "time"), (stopped, "memory")):
        best = best_of_variants(asked, solve, lambda result: result.statistics.stopped)
        assert best.plans[0] is found.plans[0]
        assert best.statistics.stopped_by == by


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_best_of_all_is_taken_and_kept() -> None:
    job = {"devices": 8, "cluster": "node=4,cluster@5", "global_batch": 32, "seq_len": 128}
    job["pinned"] = {"tensor": 1, "pipeline": 1, "context": 2, "zero": 0, "micro_batches": 1}
    found = {
        way: planner.search("mixtral-tiny", "h100", alltoall=way, **job).plan for way in (True, "node", False, "auto")
    }
    times = {way: plan.prediction.step_seconds for way, plan in found.items()}
    assert times.pop("auto") == min(times.values())
    plan = found["node"]
    assert {axis.alltoall for axis in plan.mesh.axes} == {True, False}
    graph, batch = planner.api.planned.planned_graph(plan)
    machine = planner.api.jobs.machine_given("h100", cluster=job["cluster"], devices=8)
    assert repriced(plan, graph, batch, machine).plan.mesh == plan.mesh
    assert "--alltoall-on node" in command_of(plan)
    assert "--no-alltoall" in command_of(found[False])
