"""Gradients that are reduced under the last backward pass: what the bound is about, and how large buckets become."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

import planner
from hardware_profiles import load_profile
from planner.errors import RequestError
from planner.plan.binding.bind import BoundPlan
from planner.plan.file import load_plan, save_plan
from planner.plan.layout import per_step_communication
from planner.plan.layout.block_gathers import kinds_of_runs, longest_gather, run_of
from planner.plan.prediction.predict import predict
from planner.plan.prediction.step import REDUCED_AHEAD
from planner.pricing.bucket_size import auto_bucket
from planner.sharding.buckets import trainable_positions
from planner.sharding.mesh import build_mesh
from planner.sharding.update import MOST_BUCKET
from planner.strategy_search.finalists import bucket_sizes
from planner.strategy_search.finalists.bucket_sizes import in_faster_buckets
from planner.strategy_search.finalists.proofs import bounded_seconds
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.result import SearchResult
from planner.strategy_search.search import search
from tests.refusals import refused
from tests.unit.search.cases import cluster_of, request_of, with_own_network

CPU = with_own_network(load_profile("cpu"))


def found(buckets: int | str = "auto", devices: int = 4, gathers: str = "auto") -> SearchResult:
    return planner.search(
        model="gpt-tiny",
        devices=devices,
        hardware=CPU,
        global_batch=8,
        pinned={"pipeline": 1, "micro_batches": 1, "mesh": (devices,)},
        update={"buckets": buckets, "gathers": gathers},
        simplicity=0.0,
    )


@pytest.fixture(scope="module")
def free() -> SearchResult:
    return found()


def test_the_bound_is_about_the_step(free: SearchResult) -> None:
    prediction = free.plan.prediction
    assert dict(prediction.time)[REDUCED_AHEAD] < 0
    assert bounded_seconds(free.plan) == prediction.step_seconds
    assert free.bound_seconds <= prediction.step_seconds


@pytest.mark.cases(1)
@pytest.mark.parametrize("buckets", [2**16, 2**28])
def test_no_size_of_buckets_beats_the_one_that_is_found_or_the_bound(free: SearchResult, buckets: int) -> None:
    """In the largest all gradients wait for the last."""
    pinned = found(buckets).plan.prediction.step_seconds
    assert free.bound_seconds <= pinned * (1 + 1e-9)
    assert free.plan.prediction.step_seconds <= pinned * (1 + 1e-9)
    assert buckets < 2**28 or free.plan.prediction.step_seconds < pinned


def test_buckets_end_with_blocks_where_that_exposes_less() -> None:
    """The gradients of the last block of the pass wait for no others; no fewer buckets are as fast, nor are those of a
    size."""
    devices = 8  # of a sample each, whose backward pass covers less than half of the reductions
    free = found(devices=devices, gathers="each")  # ahead all gradients would leave under the pass
    bound, splits = free.plans[0].bound, free.plan.training.update.buckets
    assert isinstance(splits, tuple)
    positions = trainable_positions(bound.graph)
    firsts = {bound.blocks.block_of(min(bound.graph.consumers[name])): at for name, at in reversed(positions.items())}
    assert set(splits) <= set(firsts.values())
    assert {firsts[0], firsts[1]} <= set(splits)
    step = free.plan.prediction.step_seconds
    for other in (splits[:1], splits[-1:], splits[::2], *(1 << power for power in range(18, 23))):
        update = replace(free.plan.training.update, buckets=other)
        plan = replace(free.plan, training=replace(free.plan.training, update=update))
        assert free.bound_seconds <= step < predict(replace(bound, plan=plan), CPU.with_devices(devices)).step_seconds


@pytest.mark.slow
def test_larger_buckets_are_tried_where_gradients_have_no_room_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them wait for the end of the pass here."""
    for module in (per_step_communication, bucket_sizes):
        monkeypatch.setattr(module, "room_of", lambda size: size / 64)
    pinned = {"pipeline": 2, "micro_batches": 2, "zero": 1, "tensor": 1}
    asked = {"buckets": 2**16}
    plan = planner.search(
        "gpt-tiny", CPU, devices=4, global_batch=8, pinned=pinned, update=asked, simplicity=0.0
    ).plans[0]
    cluster = CPU.with_devices(4)

    def predicted(bound: BoundPlan) -> BoundPlan:
        return replace(bound, plan=replace(bound.plan, prediction=predict(bound, cluster)))

    small = predicted(plan.bound)
    assert REDUCED_AHEAD not in dict(small.plan.prediction.time)
    large = in_faster_buckets(small, predicted, lambda _: True)
    assert isinstance(large.plan.training.update.buckets, int)
    assert large.plan.training.update.buckets > 2**16
    assert large.plan.prediction.step_seconds < small.plan.prediction.step_seconds
    assert in_faster_buckets(small, predicted, lambda other: other is small) is small  # there is no memory for it


@pytest.mark.thorough
def test_buckets_have_twice_as_much_as_those_behind_them() -> None:
    """Or three times as much: the last two have halves of a block, the last one what comes before the blocks, too. Or
    each has a block of its own."""
    bound, tried = found(devices=8, gathers="each").plans[0].bound, list[tuple[int, ...]]()

    def predicted(other: BoundPlan) -> BoundPlan:
        tried.append(cast(tuple[int, ...], other.plan.training.update.buckets))
        return other

    in_faster_buckets(bound, predicted, lambda _: True)
    each, doubled, tripled = tried
    number = bound.blocks.count
    assert len(each) == number
    assert each[0] < doubled[0] == tripled[0] < each[1]
    assert doubled[1:] == tuple(each[at] for at in (1, 2, 4, 8) if at < number)
    assert tripled[1:] == tuple(each[at] for at in (1, 3, 9) if at < number)


def test_the_longest_message_is_all_weights_of_a_block(free: SearchResult) -> None:
    bound = free.plans[0].bound
    runs = kinds_of_runs(bound.blocks, len(bound.graph.operators))
    assert [run_of(bound.blocks, run[0]) % len(runs) for run in runs] == [0, 1, 2]
    sizes = {p.name: bound.graph.types[p.name].nbytes for p in bound.graph.parameters}
    block = {name for at in runs[1] for name in bound.graph.operators[at].operands if name in sizes}
    longest = longest_gather(bound.graph, runs[1], free.plan.training.update)
    assert longest == (sum(sizes[name] for name in block),) * 2


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_sums_hope_too_little_of_contends_where_steps_are_longer() -> None:
    """On slow links a backward pass covers less than its sum says, of one mesh more than of another."""

    def best(**pinned: int) -> float:
        found = planner.search(
            "llama-tiny",
            devices=8,
            hardware="cpu",
            cluster="node=2@50,cluster@1",
            global_batch=8,
            simplicity=0.0,
            pinned=pinned,
        )
        return found.plan.prediction.step_seconds

    assert best() <= best(pipeline=1, micro_batches=1) * (1 + 1e-9)


@pytest.mark.slow
def test_a_bucket_takes_no_more_memory_than_all_gradients(tmp_path: Path) -> None:
    """Nor is there a size with which a plan that was found cannot be read."""
    size = MOST_BUCKET
    plan = found(size, devices=2).plan
    assert plan.training.update.buckets == size
    assert plan.prediction.peak_bytes < 2**31
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").training.update.buckets == size


def test_a_bucket_that_nothing_fills_is_refused() -> None:
    with refused(RequestError, "buckets", MOST_BUCKET + 1):
        found(MOST_BUCKET + 1)


@pytest.mark.exhaustive
def test_a_small_model_pays_for_the_one_message_that_it_sends() -> None:
    """All its gradients fill a hundredth of the bucket that the links ask for."""
    request = request_of("kinds-in-turn", cluster_of("cpu", 8), 32)
    free = search(request).plans[0].seconds
    for zero in (0, 1):
        decided = search(replace(request, pinned=Pinned(zero=zero, pipeline=1)))
        assert free <= decided.plans[0].seconds * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_layouts_of_a_small_model_are_found_in_buckets_that_links_ask_for_too() -> None:
    """Both sizes hold all gradients of a stage, so that its messages are the same in both; sums charge other shares."""
    cluster = load_profile("h100-80gb").with_devices(8)
    free, decided = (
        planner.search(
            "gpt-tiny",
            devices=8,
            hardware="h100-80gb",
            global_batch=32,
            precision="bf16",
            pinned={"pipeline": 2, "mesh": (4,), "recompute": "full"},
            update={"buckets": buckets},
            simplicity=0.0,
        ).plan.prediction.step_seconds
        for buckets in ("auto", auto_bucket(build_mesh(cluster, (4,)), cluster))
    )
    assert free <= decided * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_room_for_overlaps_is_left_of_what_is_found_without_buckets_too() -> None:
    """What lacks memory for its overlaps is found anew as it was found, without buckets."""
    cluster = load_profile("h100-80gb").with_devices(16384)
    cluster = replace(cluster, device=replace(cluster.device, communication_units=0))
    free, without = (
        planner.search(
            "llama405b",
            devices=16384,
            hardware=cluster,
            global_batch=65536,
            precision="bf16",
            pinned={"pipeline": 16, "mesh": (128, 8), "micro_batches": 512, "virtual_stages": 1},
            update={"buckets": buckets},
            simplicity=0.0,
        ).plan.prediction.step_seconds
        for buckets in ("auto", "none")
    )
    assert free <= without * (1 + 1e-4)
