"""Experts are exchanged under other work where that pays, and no more is saved than is sent, or than runs meanwhile."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

import planner
from costmodels import collective_time
from hardware_profiles import Cluster
from planner.errors import PlanFileError, RequestError
from planner.plan.binding.bind import BoundPlan, bind
from planner.plan.file import dump_plan, parse_plan
from planner.plan.layout.expert_overlap import (
    ExpertOverlap,
    divided,
    expert_overlap_name,
    expert_overlaps_of,
    possible_expert_overlaps,
)
from planner.plan.layout.overlapped_products import overlaps_of
from planner.plan.layout.segments import segments_by_stage
from planner.plan.prediction.predict import predict
from planner.plan.prediction.step import UNDER_EXCHANGE
from planner.plan.prediction.walk.walk import walks_of
from planner.pricing import OperatorPrices
from planner.strategy_search.engine.exchange_overlap import best_expert_overlaps, with_expert_overlap
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.request.template import Template
from planner.strategy_search.result import SearchResult
from planner.strategy_search.search import search
from planner.strategy_search.tables.candidates import CandidateLists
from planner.strategy_search.tables.under_experts import Exchanged, saved_by_exchange
from tests.distributed import plans
from tests.distributed.dividing import by_hand
from tests.distributed.exchanging import exchanged
from tests.distributed.overlapping import overlapped as with_products_overlapped
from tests.refusals import refused
from tests.unit.search.cases import cluster_of, request_of, with_own_network

ENDLESS = (float("inf"),)


def bound_of(model: str = "mixture", **settings: object) -> BoundPlan:
    """Two blocks of four experts over two devices, with an MLP that all tokens pass."""
    plan = by_hand("samples", model, plans.mesh_of(2, 1), **settings)
    return bind(plan, plans.traced(model), plans.BATCH)


def overlapped(bound: BoundPlan, **pinned: object) -> BoundPlan:
    return with_expert_overlap(bound, Pinned(**pinned), with_own_network(cluster_of("cpu", 2)), ENDLESS).bound  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_step_is_shorter_by_what_is_saved() -> None:
    waits, cluster = bound_of(), with_own_network(cluster_of("cpu", 2))
    waits = replace(waits, plan=replace(waits.plan, prediction=predict(waits, cluster)))
    found = overlapped(waits, expert_overlap=True).plan
    time = dict(found.prediction.time)
    assert sum(time.values()) == pytest.approx(found.prediction.step_seconds)
    assert 0 < -time[UNDER_EXCHANGE] < time["communication"]
    assert found.prediction.peak_bytes >= waits.plan.prediction.peak_bytes
    saved = waits.plan.prediction.step_seconds - found.prediction.step_seconds
    assert saved == pytest.approx(-time[UNDER_EXCHANGE])
    assert overlapped(waits, expert_overlap=False).plan == waits.plan


def test_no_way_saves_more_than_it_takes_or_than_runs_meanwhile() -> None:
    bound, cluster = bound_of(), with_own_network(cluster_of("cpu", 2))
    (walk,) = {id(walk): walk for walk in walks_of(bound, cluster)}.values()
    at, beside = next(iter(possible_expert_overlaps(bound, ())))
    ways = walk.exchanges.ways(at)
    hidden = bound.graph.types[bound.graph.operators[at].operands[0]]
    nbytes = hidden.nbytes / 2 * 2  # tokens of a device of two, as rows of two experts each
    assert ways.rows == pytest.approx(float(collective_time("all_to_all", nbytes, cluster.group(2, 1))), rel=0.01)
    assert ways.rows < ways.weighted < 2 * ways.rows
    nothing = walk.exchanges.saves(ExpertOverlap(at=at))
    assert nothing.forward == 0
    assert 0 < nothing.backward <= ways.weighted  # under gradients of the experts' own weights
    for count in range(len(beside) + 1):
        saved = walk.exchanges.saves(ExpertOverlap(at=at, there=beside[:count], back=beside[count:]))
        assert 0 < saved.forward <= ways.rows + ways.weighted
        assert nothing.backward <= saved.backward <= ways.rows + ways.weighted
    ((name, best),) = best_expert_overlaps(bound, cluster)
    assert name == bound.graph.operators[at].name
    assert 0 <= best <= len(beside)


@pytest.mark.parametrize("some", [0, 1, 2, 99])
def test_sums_hope_for_no_more_than_kernels_beside_can_cover(some: int) -> None:
    """However these are divided; with nothing beside for what a plan saves. Gradients of the experts' own matrices
    cover one way alone."""
    bound, cluster = bound_of(), with_own_network(cluster_of("cpu", 2))
    graph, mesh, (walk, *_) = bound.graph, bound.plan.mesh, walks_of(bound, cluster)
    at, every = next(iter(possible_expert_overlaps(bound, ())))
    beside, operator = every[:some], bound.operators[at]
    prices = [walk.price(bound.operators[one], counted=False) for one in (at, *beside)]
    candidates = CandidateLists(mesh=mesh).among(operator.rule, (operator.strategy,))
    template = cast("Template", SimpleNamespace(graph=graph))  # all that is read of one

    def hoped(own: OperatorPrices) -> Exchanged:
        return saved_by_exchange(template, at, candidates, own, prices[1:], mesh, cluster)

    saved, ways = hoped(prices[0]), walk.exchanges.ways(at)
    divided = (ExpertOverlap(at=at, there=beside[:count], back=beside[count:]) for count in range(len(beside) + 1))
    plans_save = [walk.exchanges.saves(one) for one in divided]
    assert float(saved.forward[0]) >= max(one.forward for one in plans_save) * (1 - 1e-9)
    assert float(saved.backward[0]) >= max(one.backward for one in plans_save) * (1 - 1e-9)
    if not some:
        assert float(saved.backward[0]) == pytest.approx(plans_save[0].backward)
    endless = hoped(replace(prices[0], backward=prices[0].backward + 1.0))  # of the gradients of matrices
    covered = min(ways.sent, math.fsum(float(one.backward[0]) for one in prices[1:]))
    assert float(endless.backward[0]) == pytest.approx(covered + ways.weighted)


def test_what_is_beside_experts_is_their_shared_part() -> None:
    bound = bound_of()
    for at, beside in possible_expert_overlaps(bound, overlaps_of(bound)):
        names = [bound.graph.operators[one].name.rpartition(".")[2] for one in beside]
        assert [name for name in names if name.endswith("linear")] == [
            f"{one}_proj/linear" for one in ("gate", "up", "down")
        ]
        assert at not in beside


def test_a_block_runs_what_is_beside_its_experts_behind_their_departure() -> None:
    bound = overlapped(bound_of(), expert_overlap=True)
    (segments,) = segments_by_stage(bound)
    order = [at for segment in segments for at in segment.operators]
    assert sorted(order) == list(range(len(bound.operators)))
    for one in expert_overlaps_of(bound, ()):
        place = order.index(one.at)
        assert tuple(order[place + 1 : place + 1 + len(one.beside)]) == one.beside


def test_experts_side_by_side_share_out_what_is_beside_them() -> None:
    """Every operator runs once, after those that make what it reads."""
    bound = bound_of("mixtures")
    possible = list(possible_expert_overlaps(bound, ()))
    for some in (0, 3, 99):
        named = {expert_overlap_name(at, bound): min(some, len(beside)) for at, beside in possible}
        training = replace(bound.plan.training, expert_overlap=tuple(sorted(named.items())))
        (segments,) = segments_by_stage(replace(bound, plan=replace(bound.plan, training=training)))
        order = [at for segment in segments for at in segment.operators]
        assert sorted(order) == list(range(len(bound.operators)))
        made = {name: place for place, at in enumerate(order) for name in bound.graph.operators[at].results}
        read = [(place, name) for place, at in enumerate(order) for name in bound.graph.operators[at].operands]
        assert all(made.get(name, -1) < place for place, name in read)
    shared = [[bound.graph.operators[one].name for one in beside if one > at] for at, beside in possible]
    assert all(any("shared_expert" in name for name in names) for names in shared)


def test_products_that_run_in_one_call_run_in_the_same_part_of_an_exchange() -> None:
    """Queries, keys and values of attention beside the experts, under the sum of the gradient of what they read."""
    bound = bind(with_products_overlapped(by_hand("folded", "beside", plans.mesh_of(1, 2)), "beside", 1),
                 plans.traced("beside"), plans.BATCH)  # fmt: skip
    overlaps = overlaps_of(bound)
    at, beside = next(iter(possible_expert_overlaps(bound, overlaps)))
    (together,) = ({one.at, *one.early} for one in overlaps if one.at in beside and one.early)
    assert len(together) == 4
    assert together <= set(beside)
    for count in range(len(beside) + 1):
        one = divided(at, beside, count, overlaps)
        assert (*one.there, *one.back) == beside
        assert len(one.there) >= count
        assert together <= set(one.there) or not together & set(one.there)


def test_sums_behind_the_exchange_are_not_computed_again() -> None:
    """All that keeps something runs during the exchange: attention, which the graph has behind the first sum."""
    plan = by_hand("folded", "beside", plans.mesh_of(1, 2), recomputation="full")
    bound = bind(exchanged(plan, "beside", 3), plans.traced("beside"), plans.BATCH)
    (segments,) = segments_by_stage(bound)
    block = next(segment for segment in segments if segment.recomputed)
    names = [bound.graph.operators[at].name.removeprefix("model.layers.0") for at in block.operators]
    assert names[block.again - 1 : block.again + 1] == [".self_attn.o_proj/linear", ".mlp/add"]


def test_a_plan_comes_back_from_its_file_and_what_it_names_must_be_there() -> None:
    bound = overlapped(bound_of(), expert_overlap=True)
    plan = bound.plan
    assert plan.training.expert_overlap
    assert parse_plan(dump_plan(plan)).training == plan.training
    ((name, _),) = plan.training.expert_overlap
    for wrong in (("model.norm/rms_norm", 0), (name, 99)):
        changed = replace(plan, training=replace(plan.training, expert_overlap=(wrong,)))
        with pytest.raises(PlanFileError, match=r"training\.expert_overlap"):
            expert_overlaps_of(bind(changed, plans.traced("mixture"), plans.BATCH), ())


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_search_overlaps_on_devices_and_on_processors_where_it_is_asked() -> None:
    """Devices that are not too quick for their host."""
    given = {"data": 2, "expert": 2, "interleave": 1, "tensor": 1}

    def found(cluster: Cluster, **more: object) -> tuple[tuple[str, int], ...]:
        pinned = Pinned(**{**given, **more})  # type: ignore[arg-type]
        return planner.search("deepseek-tiny", cluster, pinned=pinned).plan.training.expert_overlap

    cluster = cluster_of("h100-80gb", 2)
    patient = replace(cluster, device=replace(cluster.device, host_latency=0.0))
    assert found(patient)
    assert not found(patient, expert_overlap=False)
    assert not found(with_own_network(cluster_of("cpu", 2)))
    assert found(with_own_network(cluster_of("cpu", 2)), expert_overlap=True)
    with refused(RequestError, "expert_overlap", "no rows of experts"):
        planner.search("llama-tiny", "h100", devices=2, pinned=Pinned(expert_overlap=True))


WIDE = {
    "num_layers": 3, "dense_layers": 1, "hidden_size": 2048, "ffn_size": 4096, "num_heads": 16, "q_rank": 512,
    "kv_rank": 256, "plain_size": 64, "rotary_size": 32, "value_size": 64, "num_experts": 16, "experts_per_token": 2,
    "expert_size": 1024, "shared_size": 8192, "expert_groups": 1, "chosen_groups": 1, "groups_by": 1,
}  # fmt: skip
"""Of DeepSeek's tiny model: experts that send for as long as they compute, and a shared expert that covers that."""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_sums_know_what_is_exchanged_under_work() -> None:
    """A plan that cuts its experts over devices takes longer where all is waited for, and less in the end."""
    model = "+".join(("deepseek-tiny", *(f"{name}={value}" for name, value in sorted(WIDE.items()))))

    def best(**pinned: int) -> SearchResult:
        return planner.search(
            model, devices=4, cluster="cluster@50", seq_len=2048, global_batch=16, pinned={"micro_batches": 1, **pinned}
        )

    free, cut = best(), best(expert=4)
    assert cut.plan.training.expert_overlap
    assert free.plan.prediction.step_seconds <= cut.plan.prediction.step_seconds
    assert free.bound_seconds <= cut.plan.prediction.step_seconds


@pytest.mark.slow
@pytest.mark.thorough
def test_room_is_left_for_what_is_asked_for() -> None:
    """The fastest plan fits with its experts waited for, and not with their exchange under other work."""
    cluster = with_own_network(cluster_of("cpu", 4))
    bare = replace(cluster, device=replace(cluster.device, reserved=0.0, allocator_slack=0.0))
    asked = request_of("few-experts", bare, 8, pinned=Pinned(expert_overlap=True))
    fastest = search(asked).plan.prediction
    found = search(replace(asked, memory_limit=fastest.peak_bytes * 0.9999)).plan
    assert found.training.expert_overlap
    assert found.prediction.peak_bytes <= fastest.peak_bytes * 0.9999
    assert found.prediction.step_seconds < fastest.step_seconds * 1.01
