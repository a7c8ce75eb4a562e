"""Small plans with the decisions of large ones: which blocks and ranks they keep, and what of the plan they cover."""

from dataclasses import replace
from functools import cache

import pytest
import torch

import planner
from hardware_profiles import load_profile
from planner.errors import RequestError
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.models.smaller import Depth, depth_of, smaller_model
from planner.models.zoo import ZOO, build_model, zoo_config
from planner.plan.binding.bind import BoundPlan, bind
from planner.plan.plan import Plan, Stage
from planner.plan.prediction.predict import predict
from planner.plan.shrinking.coverage import coverage
from planner.plan.shrinking.facts import facts_of
from planner.plan.shrinking.kept_blocks import kept_blocks, kept_of_stages
from planner.plan.shrinking.shrink import EXACT, SmallPlan, shrink
from planner.plan.shrinking.small_mesh import small_numbers
from planner.plan.shrinking.smallest import SmallRequest, smallest
from planner.sharding.mesh import Mesh
from tests.distributed import plans
from tests.unit.search.test_shared_weights import SharedLayer


def test_two_blocks_of_every_run_are_kept_and_no_neighbours_are_lost() -> None:
    signs = "aaaaaabbbbaaabb"
    assert [signs[at] for at in kept_blocks(range(len(signs)), signs)] == list("aabbaabb")
    assert kept_blocks(range(4), "abcd") == [0, 1, 2, 3]
    assert kept_blocks(range(8), "abababab") == [0, 5, 6, 7]


def test_ranks_between_the_ends_stand_for_all_of_them() -> None:
    plan = replace(_many_stages(8), virtual_stages=1)
    signs = [0, 0, 0, 7, 0, 0, 0, 0]
    assert kept_of_stages(plan, signs, 3, 1) == [[0], [1, 2, 3, 4, 5], [7]]
    assert kept_of_stages(plan, signs, 2, 1) == [[0], [7]]


def _many_stages(count: int) -> Plan:
    plan = plans.hand_plan("zero1", "llama", plans.mesh_of(2))
    return replace(plan, stages=tuple(Stage(first_block=at, blocks=1) for at in range(count)))


def test_numbers_of_a_pipeline() -> None:
    plan = _many_stages(8)
    training = replace(plan.training, micro_batches=32, global_batch=32)
    wide = replace(plan, mesh=plans.mesh_of(64), training=training)
    numbers = small_numbers(wide, 16)
    assert (numbers.mesh.sizes, numbers.ranks, numbers.processes) == ((2,), 3, 6)
    assert numbers.ranks < numbers.micro_batches < 32
    assert small_numbers(wide, 4).ranks == 2
    few = replace(wide, training=replace(training, micro_batches=4, global_batch=4))
    assert small_numbers(few, 16).micro_batches < small_numbers(few, 16).ranks
    with pytest.raises(RequestError, match="--processes 2: axes of 2 and a pipeline of 2 need 4 processes"):
        small_numbers(wide, 2)


@pytest.mark.parametrize("name", ["llama70b", "deepseek-v3", "gpt3-175b", "gemma-2b", "qwen2.5-0.5b"])
def test_a_smaller_model_is_built_the_same_way(name: str) -> None:
    length = ZOO[name].sequence_length
    found = smaller_model(name, length, Depth(layers=4, dense=2), 2)
    module = build_model(found.reference, dtype="float32", sequence_length=found.sequence_length).module
    assert sum(one.numel() for one in module.parameters()) < 200_000
    config, small = zoo_config(name, length), zoo_config(found.reference, found.sequence_length)
    for switch in ("tied_embeddings", "qkv_bias", "sigmoid_scores", "scaled_embeddings", "balance_loss"):
        assert getattr(config, switch, None) == getattr(small, switch, None)
    assert depth_of(found.reference, found.sequence_length) == Depth(layers=4, dense=2 if name == "deepseek-v3" else 0)


def test_a_model_of_a_factory_has_to_be_given_small() -> None:
    with pytest.raises(RequestError, match=r"--small package\.module:factory"):
        smaller_model("package.module:factory", None, None, 2)


@cache
def _traced(name: str) -> tuple[OperatorGraph, int]:
    built = build_model(name, dtype="float32", sequence_length=16)
    return trace(built.module, built.args, built.kwargs), built.batch


def _by_hand(mesh: Mesh, *, layers: int = 6, **settings: object) -> BoundPlan:
    name = f"llama-tiny+num_layers={layers}"
    graph, batch = _traced(name)
    plan = plans.hand_plan("zero3", name, mesh, graph=graph, samples=batch, global_batch=32, **settings)
    return bind(replace(plan, model=replace(plan.model, sequence_length=16)), graph, batch)


def _small(large: BoundPlan, precision: str = "fp32") -> SmallPlan:
    machine = load_profile("cpu").with_devices(large.plan.cluster.devices)
    return shrink(large, precision=precision, reference=large.plan.model.reference, machine=machine)


def test_a_small_plan_has_every_decision() -> None:
    large = _by_hand(plans.mesh_of(8), recomputation=("none", "none", "full", "full", "full", "full"))
    machine = load_profile("cpu")
    found = _small(large)
    assert (found.plan.mesh.sizes, found.stands_for) == ((2,), (0, 1, 2, 3))
    facts = facts_of(large, machine.with_devices(8))
    covered = coverage(facts, [facts_of(found.bound, found.machine)])
    assert {one.kind: one.missing for one in covered} == {one.kind: () for one in covered}
    assert sum(one.different for one in covered) > 20


def test_a_rank_keeps_both_kinds_of_chunks_between_the_ends_where_turns_are_missing() -> None:
    """With four chunks on each of two ranks one between the ends is forward where the other is backward."""
    large = _by_hand(
        plans.mesh_of(2),
        stages=(1, 1, 1, 1, 1, 1, 1, 1),
        virtual_stages=4,
        schedule="interleaved_1f1b",
        micro_batches=8,
        layers=8,
    )
    machine = load_profile("cpu").with_devices(4)
    request = SmallRequest(
        machine=machine, reference=large.plan.model.reference, small=None, processes=4, precisions=("fp32",)
    )
    facts = facts_of(large, machine)
    (found,), covered = smallest(large, facts, request)
    assert found.plan.virtual_stages == 4
    assert all(one.complete for one in covered)
    (fewer,) = [
        one for one in coverage(facts, [facts_of(_small(large).bound, machine)]) if one.kind == "schedule steps"
    ]
    assert fewer.missing


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "pinned", "small", "samples"),
    [
        (8, {"data": 8, "zero": 1, "replicas": 2}, 4, 8),  # on two axes, one a device
        (16, {"data": 8, "zero": 1, "replicas": 2}, 8, 8),  # two a device, of one sample each
        (8, {"data": 4, "tensor": 2}, 4, 8),  # one of several axes, two a device
        (4, {"data": 4, "tensor": 2}, 2, 4),
        (3, {"data": 1, "tensor": 2}, 2, 4),  # none of the axes
    ],
)
def test_a_small_plan_has_as_many_replicas_as_its_devices_hold(
    replicas: int, pinned: dict[str, int], small: int, samples: int
) -> None:
    """All that a device of the large plan has, one or several, is there in the small one; a replica joins samples, as
    in the large plan."""
    devices = 8 if pinned["data"] > 1 else 2
    found = planner.search(
        "llama-tiny", "cpu", devices=devices, global_batch=48 if replicas == 3 else 16, seq_len=16, precision="fp32",
        pinned={**pinned, "micro_batches": 1, "recompute": "none"}, per_replica=[f"*cross_entropy*={replicas}"],
    )  # fmt: skip
    training = _small(found.bound).plan.training
    assert (training.update.replicas, training.part) == (small, samples)


def test_what_a_small_plan_lacks_is_named_and_counted() -> None:
    large = _by_hand(plans.mesh_of(8), recomputation=("none", "none", "full", "full", "full", "full"))
    other = _small(_by_hand(plans.mesh_of(8)))
    facts = facts_of(large, load_profile("cpu").with_devices(8))
    found = {one.kind: one for one in coverage(facts, [facts_of(other.bound, other.machine)])}
    assert not found["recomputation"].complete
    assert ("block with 9 parameters recomputes all", 4) in found["recomputation"].missing
    assert found["operators"].complete
    nothing = coverage(facts, [])
    assert all(one.covered == one.covered_times == 0 for one in nothing)


def test_an_exact_plan_has_the_same_operators_in_float64() -> None:
    """Nothing is cast to fp32, and nothing is priced that no profile has a rate for."""
    large = _by_hand(plans.mesh_of(2))
    wide, narrow = _small(large, EXACT), _small(large)
    assert [op.op for op in wide.traced.operators] == [op.op for op in narrow.traced.operators]
    assert {t.dtype for t in wide.traced.types.values()} == {"float64", "int64"}
    assert {t.dtype for t in wide.bound.graph.types.values()} == {"float32", "int64"}
    assert wide.exact
    assert wide.plan.model.fingerprint == wide.traced.fingerprint() != narrow.plan.model.fingerprint
    assert predict(wide.bound, wide.machine) == predict(narrow.bound, narrow.machine)


def test_a_plan_that_trains_with_old_weights_is_refused() -> None:
    large = _by_hand(plans.mesh_of(2), stages=(3, 3), schedule="pipedream_2bw", micro_batches=4)
    with pytest.raises(RequestError, match="prove the plan with schedule '1f1b'"):
        _small(large)


def test_a_plan_of_layers_that_share_all_weights_is_shrunk() -> None:
    graph = trace(*shared())
    found = planner.search(graph, "cpu", batch=2, devices=2, precision="fp32", global_batch=2).plan
    large = bind(found, graph, 2)
    name = "tests.unit.plan.test_shrinking:shared"
    small = shrink(large, precision="fp32", reference=name, machine=load_profile("cpu"), small=name)
    assert small.bound.blocks.count == large.blocks.count == 2
    assert len(small.bound.operators) == len(large.operators)


def shared() -> tuple[SharedLayer, tuple[torch.Tensor]]:
    return SharedLayer(2), (torch.ones(2, 16),)
