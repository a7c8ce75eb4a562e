"""Blocks that are visited once: the prediction is the one of visiting all, to the last bit."""

from dataclasses import replace
from functools import cache
from typing import Literal

import pytest

import planner
from planner.plan.binding.bind import BoundPlan, bind
from planner.plan.layout.segments import segments_by_stage
from planner.plan.prediction import predict as predicting
from planner.plan.prediction.loosening import loosened
from planner.plan.prediction.predict import predict
from planner.plan.prediction.walk.repeated_blocks import block_keys, repeated_blocks
from planner.pricing.liveness import liveness
from planner.sharding.update import Update
from planner.strategy_search.request.offload import Offload
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.search import search
from tests.unit.plan.plans import BY_HAND, plan_named
from tests.unit.search.cases import BATCH, cluster_of, request_of, traced

SIX, MESHES = "llama-6-tied", {1: (2, 4), 2: (4,)}
"""A model of six blocks, and the mesh of a rank of so many."""

TWELVE = "llama-12"


@cache
def bound_of(ranks: int, recompute: str = "none", gathers: str = "each") -> BoundPlan:
    zero = None if gathers == "each" else 3
    mesh = MESHES[ranks] if zero is None else None
    data = None if zero is None else 4
    pinned = Pinned(mesh=mesh, zero=zero, data=data, pipeline=ranks, micro_batches=2, recompute=recompute)  # type: ignore[arg-type]
    request = request_of(SIX, cluster_of("h100-80gb", 8), 8, pinned=pinned, update=Update(gathers=gathers))
    plan = search(request).plan
    return bind(plan, traced(SIX), BATCH)


def all_visited(bound: BoundPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_of(bound.plan.cluster.profile, bound.plan.cluster.devices)
    once = predict(bound, cluster)
    monkeypatch.setattr(predicting, "block_keys", lambda bound, alive: {})
    assert predict(bound, cluster) == once


@pytest.mark.cases(2)
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_the_prediction_is_that_of_all_visits(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = bound_of(1, recompute)
    assert repeated_blocks(block_keys(bound, liveness(bound.graph))) == {3: 2}
    all_visited(bound, monkeypatch)


@pytest.mark.cases(1)
@pytest.mark.parametrize("gathers", ["ahead", "block"])
def test_so_it_is_where_blocks_gather_their_weights_together(gathers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = bound_of(1, "full", gathers)
    (stage,) = segments_by_stage(bound)
    assert any(one.gathers for one in stage)
    assert repeated_blocks(block_keys(bound, liveness(bound.graph))) == {3: 2}
    all_visited(bound, monkeypatch)


@pytest.mark.cases(1)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_so_it_is_where_stages_are_alike(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same blocks in another stage, where other numbers of micro-batches are in flight."""
    pinned = Pinned(pipeline=2, virtual_stages=2, micro_batches=4, mesh=(4,), recompute=recompute)  # type: ignore[arg-type]
    plan = search(request_of(TWELVE, cluster_of("h100-80gb", 8), 16, pinned=pinned)).plan
    bound = bind(plan, traced(TWELVE), BATCH)
    stages = [stage for stage in bound.plan.stages for _ in range(stage.blocks)]
    found = repeated_blocks(block_keys(bound, liveness(bound.graph)))
    assert any(stages[block] != stages[like] for block, like in found.items())
    all_visited(bound, monkeypatch)


OFFLOADS = (
    ("none", Offload(saved=("host",))),
    ("full", Offload(activations=("host",))),
    ("full", Offload(activations=("host",), optimizer=("host",), weights=("host",))),
)
"""Recomputation, and what is offloaded."""


@pytest.mark.cases(1)
@pytest.mark.parametrize(("recompute", "offload"), OFFLOADS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_so_it_is_where_blocks_offload(
    ranks: int,
    recompute: Literal["none", "full"],
    offload: Offload,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks that offload the same are alike; beside those that offload nothing they are not."""
    mesh = (8 // ranks,)
    pinned = Pinned(mesh=mesh, pipeline=ranks, micro_batches=4, recompute=recompute, offload=offload)
    plan = search(request_of(TWELVE, cluster_of("h100-80gb", 8), 32, pinned=pinned)).plan
    bound = bind(plan, traced(TWELVE), BATCH)
    assert sorted(bound.offloaded_blocks) == list(range(12))
    assert bound.offloads_weights == (offload.weights == ("host",))
    found = repeated_blocks(block_keys(bound, liveness(bound.graph)))
    assert found
    all_visited(bound, monkeypatch)
    monkeypatch.undo()
    loose = loosened(bound)
    stays = tuple(replace(one, activations_home="device") if one.first_block == 5 else one for one in loose.groups)
    some = bind(replace(loose, groups=stays), traced(TWELVE), BATCH)
    assert sorted(some.offloaded_blocks) == [block for block in range(12) if block != 5]
    again = repeated_blocks(block_keys(some, liveness(some.graph)))
    assert again
    assert 5 not in {*again.keys(), *again.values()}
    all_visited(some, monkeypatch)


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline", "several groups", "no blocks", BY_HAND])
def test_nothing_changes_where_little_is_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_named(name)
    all_visited(bind(plan, traced(plan.model.reference), BATCH), monkeypatch)


def test_groups_that_say_the_same_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plan with a group for every block, until one of them does something else."""
    loose = loosened(bound_of(1, "full"))
    bound = bind(loose, traced(SIX), BATCH)
    assert repeated_blocks(block_keys(bound, liveness(bound.graph))) == {3: 2}
    all_visited(bound, monkeypatch)
    other = tuple(replace(one, recomputation="none") if one.first_block == 4 else one for one in loose.groups)
    changed = bind(replace(loose, groups=other), traced(SIX), BATCH)
    assert repeated_blocks(block_keys(changed, liveness(changed.graph))) == {}
    stored = {name: replace(one, state_home="host") for name, one in bound.parameters.items() if ".3." in name}
    kept = replace(bound, parameters={**bound.parameters, **stored})
    assert repeated_blocks(block_keys(kept, liveness(kept.graph))) == {}


def test_blocks_at_the_ends_of_a_stage_or_group_are_visited() -> None:
    bound = bound_of(1)
    alive = liveness(bound.graph)
    (group,) = [group for group in bound.plan.groups if group.blocks]
    others = [one for one in bound.plan.groups if not one.blocks]
    half = replace(group, first_block=group.first_block + 3, blocks=3)
    cut = replace(bound, plan=replace(bound.plan, groups=(*others, replace(group, blocks=3), half)))
    assert repeated_blocks(block_keys(cut, alive)) == {3: 2}  # both say the same
    loose = loosened(bound)
    groups = tuple(replace(one, recomputation="full") if one.first_block >= 3 else one for one in loose.groups)
    cut = bind(replace(loose, groups=groups), traced(SIX), BATCH)
    assert repeated_blocks(block_keys(cut, liveness(cut.graph))) == {}


def test_a_block_of_which_more_is_kept_is_like_no_other() -> None:
    bound = bound_of(1)
    alive = liveness(bound.graph)
    at = bound.blocks.borders[2]
    saved = (*alive.saved[:at], alive.saved[at] ^ {7}, *alive.saved[at + 1 :])
    assert repeated_blocks(block_keys(bound, replace(alive, saved=saved))) == {}


@pytest.mark.cases(2)
@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
@pytest.mark.parametrize(("recompute", "gathers"), [("none", "each"), ("selective", "each"), ("full", "ahead")])
def test_so_it_is_where_weight_gradients_are_deferred(
    schedule: str, recompute: str, gathers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept until their turn goes by micro-batches that wait for it."""
    mesh, data, zero = ((4,), None, None) if gathers == "each" else (None, 4, 3)
    pinned = Pinned(
        pipeline=2,
        mesh=mesh,
        data=data,
        zero=zero,
        micro_batches=8,
        schedule=schedule,
        recompute=recompute,  # type: ignore[arg-type]
    )
    request = request_of(TWELVE, cluster_of("h100-80gb", 8), 32, pinned=pinned, update=Update(gathers=gathers))
    bound = bind(search(request).plan, traced(TWELVE), BATCH)
    keys = block_keys(bound, liveness(bound.graph))
    assert repeated_blocks(keys)
    plain = replace(bound, plan=replace(bound.plan, schedule="1f1b", virtual_stages=1))
    assert not {*keys.values()} & {*block_keys(plain, liveness(bound.graph)).values()}
    all_visited(bound, monkeypatch)


def test_deferred_gradients_of_a_value_that_blocks_share_are_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the encoder makes, which is kept once for all blocks of the decoder."""
    pinned = Pinned(pipeline=2, mesh=(1,), micro_batches=4, schedule="zb_h1", recompute="none")
    bound = planner.search("t5-tiny", "h100", devices=2, global_batch=8, pinned=pinned).bound
    assert block_keys(bound, liveness(bound.graph)) == {}
    all_visited(bound, monkeypatch)


@pytest.mark.thorough
@pytest.mark.slow
def test_blocks_with_buffers_of_their_own_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that evens loads out reads how full its experts were from buffers; no two blocks share one."""
    pinned = Pinned(pipeline=1, mesh=(2,), micro_batches=1, recompute="none")
    bound = planner.search("deepseek-tiny+num_layers=7", "h100", devices=2, pinned=pinned).bound
    like = repeated_blocks(block_keys(bound, liveness(bound.graph)))
    assert like, "the blocks with experts, but for the first and the last"
    all_visited(bound, monkeypatch)
