"""States that may be offloaded: priced by the search as by `predict`, and offloaded where that is faster and nowhere
else."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from hardware_profiles import Home, UnknownKeyError, of_one_kind
from planner.errors import InfeasibleError, PlanFileError, RequestError
from planner.graph.blocks import block_parameters
from planner.graph.operator_graph import OperatorGraph
from planner.plan.binding.bind import bind
from planner.plan.file import dump_plan, parse_plan
from planner.plan.plan import Plan
from planner.plan.prediction.loosening import loosened
from planner.plan.prediction.predict import predict, stage_costs
from planner.sharding.update import AUTO_GATHERS, PLAIN, Update
from planner.strategy_search import objectives
from planner.strategy_search.analysis.advice import changes
from planner.strategy_search.decomposition.chain import Chain
from planner.strategy_search.decomposition.crossings import crossing_seconds
from planner.strategy_search.decomposition.priced import State
from planner.strategy_search.decomposition.setting import Setting
from planner.strategy_search.engine.families import Shared, all_configurations, engine_of, families_of, family_of
from planner.strategy_search.engine.next_price import Asked, NextPrice
from planner.strategy_search.engine.outcome import RankFilling
from planner.strategy_search.finalists import settle
from planner.strategy_search.finalists.settle import GAP, RankProblem, rank_problem, settled
from planner.strategy_search.objectives import plan_for
from planner.strategy_search.refinement import offloading
from planner.strategy_search.refinement.offloading import WORTH, with_faster_offload
from planner.strategy_search.request.offload import ANYTHING, NOTHING, Offload, offload_of, parse_offload
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration, Pinned
from planner.strategy_search.result import SearchResult
from planner.strategy_search.search import find_fitting, search
from planner.strategy_search.solvers import dynamic_programming
from planner.strategy_search.solvers.elimination.order import EXACT
from planner.strategy_search.within import best_plans
from tests.distributed.offloading import of_blocks, offloaded, staying
from tests.refusals import refused
from tests.unit.search.cases import (
    BATCH,
    cluster_of,
    columns_of,
    make_case,
    plan_of,
    random_ranks,
    random_state,
    request_of,
    total,
    traced,
)
from tests.unit.search.test_objectives import bare
from tests.unit.search.test_tables_equal_prediction import check_bytes, same

EVERY: tuple[Home, ...] = ("device", "host", "disk")
ALL_HOMES = Offload(optimizer=EVERY, activations=EVERY, saved=EVERY, weights=EVERY)
HOST = Offload(optimizer=("host",))


@pytest.mark.cases(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "update",
    [PLAIN, replace(PLAIN, gradient_dtype="parameter", master_weights=False, moment_dtype="bf16")],
    ids=str,
)
@pytest.mark.parametrize(
    ("model", "mesh", "pipeline"),
    [
        ("llama-4", (2, 2), 1),
        ("gpt-4-tied", (4,), 2),
        ("perceptron", (2,), 1),
        ("kinds-in-turn", (2,), 2),
        ("residual-first", (2,), 1),
        ("chain-from-input", (2,), 2),
    ],
)
def test_the_pieces_and_the_prediction_agree(model: str, mesh: tuple[int, ...], pipeline: int, update: Update) -> None:
    draw = random.Random(model)
    configuration = Configuration(pipeline=pipeline, mesh=mesh, micro_batches=4)
    case = make_case(model, "h100-80gb", configuration, 16, "bf16", update=update, offload=ALL_HOMES)
    homes, offloading, away = set[str](), set[str](), set[str]()
    for _ in range(8):
        state = random_state(case, draw)
        ranks = random_ranks(case, draw, state)
        bound = bind(plan_of(case, ranks), traced(model), BATCH)
        homes |= {stored.state_home for stored in bound.parameters.values()}
        offloading |= {
            f"{home} {'saved' if bound.recompute_of(block) is None else 'reads'}"
            for block, home in bound.offloaded_blocks.items()
        }
        away |= {stored.weight_home for stored in bound.parameters.values()}
        parts, steps = [], []
        for rank, cost in enumerate(stage_costs(bound, case.cluster)):
            columns = columns_of(case, ranks, rank)
            parts.append(total(columns, "part") + float(crossing_seconds(case.chain, case.setting, rank)[state]))
            steps.append(total(columns, "step"))
            assert same(parts[-1], math.fsum(cost.micro_batch.values()))
            assert same(steps[-1], math.fsum(cost.once.values()))
            check_bytes(case, state, ranks, rank, cost, model)
        prediction = predict(bound, case.cluster)
        assert same(math.fsum(value for _, value in prediction.time), prediction.step_seconds)
        assert same(math.fsum(value for _, value in prediction.memory), prediction.peak_bytes)
        plan = replace(bound.plan, prediction=prediction)
        assert parse_plan(dump_plan(plan)) == plan
    assert homes == {"device", "host", "disk"}
    words = {f"{home} {what}" for home in ("host", "disk") for what in ("saved", "reads")}
    assert offloading == (words if case.chain.inner else set())
    assert away == ({"device", "host", "disk"} if case.chain.tables.template.every_own_parameter else {"device"})


def small(model: str, memory: float | None = None, offload: Offload = ANYTHING) -> SearchRequest:
    """One device of an H100's speed, of which every byte counts."""
    pinned = Pinned(micro_batches=1, recompute="none", offload=offload)
    return request_of(
        model, bare(cluster_of("h100-80gb", 8).with_devices(1)), BATCH, memory_limit=memory, pinned=pinned
    )


def in_every_home(plan: Plan, graph: OperatorGraph) -> Iterator[Plan]:
    names, two = sorted(graph.parameter_names), (ANYTHING.optimizer,)
    for homes in itertools.product(*(two * len(names))):
        yield offloaded(plan, dict(zip(names, homes, strict=True)).__getitem__)


@pytest.mark.parametrize("model", ["perceptron", "single-2"])
def test_nothing_is_faster_than_what_is_offloaded(model: str) -> None:
    """Every way to offload the states of a small model, under limits between the least memory and that of all of it."""
    graph = traced(model)
    rich = search(small(model)).plan
    every = [predict(bind(plan, graph, BATCH), small(model).cluster) for plan in in_every_home(rich, graph)]
    least = min(every, key=lambda one: one.peak_bytes).peak_bytes
    assert not any(stored.offloaded for group in rich.groups for _, stored in group.parameters)
    assert least < rich.prediction.peak_bytes
    for share in (0.0, 0.3, 0.6, 0.9):
        limit = least + share * (rich.prediction.peak_bytes - least)
        best = min(one.objective_seconds for one in every if one.peak_bytes <= limit * (1 + 1e-12))
        found = search(small(model, limit * (1 + 1e-12)))
        assert found.plan.prediction.objective_seconds == pytest.approx(best, rel=1e-9)
        assert found.bound_seconds <= best * (1 + 1e-9)
        assert found.plan.prediction.offloaded
        with pytest.raises(InfeasibleError):
            search(small(model, limit, NOTHING))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["perceptron", "single-2"])
def test_of_what_the_host_has_memory_for_nothing_is_faster(model: str) -> None:
    """The host lacks memory for all that would be offloaded, but not for what must be."""
    graph = traced(model)
    rich = search(small(model)).plan
    every = [predict(bind(plan, graph, BATCH), small(model).cluster) for plan in in_every_home(rich, graph)]
    low, high = (pick(one.peak_bytes for one in every) for pick in (min, max))
    for share in (0.3, 0.6, 0.9):
        limit = (low + share * (high - low)) * (1 + 1e-12)
        fitting = [one for one in every if one.peak_bytes <= limit]
        needed = min(dict(one.offloaded)["host"] for one in fitting)
        best = min(one.objective_seconds for one in fitting if dict(one.offloaded)["host"] <= needed)
        found = search(with_host(small(model, limit), needed * (1 + 1e-12)))
        assert found.plan.prediction.objective_seconds == pytest.approx(best, rel=1e-9)
        assert found.bound_seconds <= best * (1 + 1e-9)
        with pytest.raises(InfeasibleError):
            search(with_host(small(model, limit), 0.99 * needed))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.95, 0.4])
def test_plans_that_the_host_cannot_hold_make_way_for_others(share: float) -> None:
    """What offloads less, or recomputes more, is found instead, in about the time of a plan that offloads nothing."""
    request = request_of("gpt-3", bare(cluster_of("h100-80gb", 8).with_devices(1)), 16)
    limited = replace(request, memory_limit=0.7 * search(request).plan.prediction.peak_bytes)
    alone = search(replace(limited, pinned=Pinned(offload=NOTHING)))
    asked = replace(limited, pinned=Pinned(offload=ANYTHING))
    memory = share * dict(search(asked).plan.prediction.offloaded)["host"]
    found = search(with_host(asked, memory)).plan.prediction
    assert 0 < dict(found.offloaded)["host"] <= memory
    assert found.step_seconds < alone.plan.prediction.step_seconds


@pytest.mark.slow
def test_what_may_be_offloaded_to_a_short_host_is_no_slower_than_nothing() -> None:
    """With a third of what would be offloaded there, blocks that offload a part are no help."""
    request = request_of("gpt-3", bare(cluster_of("h100-80gb", 8).with_devices(1)), 16)
    limited = replace(request, memory_limit=0.9 * search(request).plan.prediction.peak_bytes)
    alone = search(replace(limited, pinned=Pinned(offload=NOTHING))).plan.prediction
    asked = replace(limited, pinned=Pinned(offload=ANYTHING))
    memory = 0.4 * dict(search(asked).plan.prediction.offloaded)["host"]
    found = search(with_host(asked, memory)).plan.prediction
    assert found.objective_seconds <= alone.objective_seconds * (1 + 1e-9)


@pytest.mark.slow
def test_activations_on_the_host_count_where_memory_of_devices_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[Asked]()

    def noted(chooser: NextPrice, asked: Asked, new: Callable[..., Asked | None] = NextPrice.new) -> Asked | None:
        tried.append(asked)
        return new(chooser, asked)

    monkeypatch.setattr(NextPrice, "new", noted)
    pinned = Pinned(recompute="none", pipeline=1, tensor=4, offload=Offload(saved=("host",)))
    request = request_of("llama-4", bare(cluster_of("h100-80gb", 8).with_devices(4)), 16, pinned=pinned)
    memory = 0.9 * dict(search(request).plan.prediction.offloaded)["host"]
    assert dict(search(with_host(request, memory)).plan.prediction.offloaded)["host"] <= memory
    assert [asked for asked in tried if asked.hosted and not asked.price]
    assert all(asked.flights for asked in tried if asked.hosted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pinned",
    [
        Pinned(recompute="none", pipeline=1, tensor=2, offload=Offload(saved=("host",))),
        Pinned(recompute="full", pipeline=1, tensor=2, offload=Offload(activations=("host",))),
    ],
    ids=["saved", "activations"],
)
def test_a_settled_rank_stays_within_the_host(pinned: Pinned, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[tuple[RankProblem, float]]()

    def noted(chain: Chain, setting: Setting, rank: int, filling: RankFilling, state: State) -> RankProblem:
        found = rank_problem(chain, setting, rank, filling, state)
        made.append((found, setting.host))
        return found

    monkeypatch.setattr(settle, "rank_problem", noted)
    request = request_of("gpt-3", bare(cluster_of("h100-80gb", 8).with_devices(2)), 16, pinned=pinned)
    memory = 0.8 * dict(search(request).plan.prediction.offloaded)["host"]
    made.clear()
    search(replace(with_host(request, memory), certify=True))
    assert made
    for found, host in made:
        columns = settled(found, dynamic_programming.solve(found.problem, relative_gap=GAP, cell_limit=EXACT))
        parts = zip(found.found.parts, columns, strict=True)
        held = [(one.times, one.flights, column.amounts) for one, column in parts]
        assert sum(times * (own.hosted + flights * own.hosted_live) for times, flights, own in held) <= host


@pytest.mark.slow
def test_interleaved_micro_batches_stay_within_the_host() -> None:
    """Two micro-batches at a time save twice as much there."""
    pinned = Pinned(pipeline=1, tensor=2, recompute="none", offload=Offload(saved=("host",)))
    request = request_of("llama-4", bare(cluster_of("h100-80gb", 8).with_devices(4)), 8, pinned=pinned)
    memory = 0.75 * dict(search(request).plan.prediction.offloaded)["host"]
    assert dict(search(with_host(request, memory)).plan.prediction.offloaded)["host"] <= memory


@pytest.mark.slow
def test_cpus_offload_nothing_by_themselves() -> None:
    """They have the host's memory: with a pin that does not fit, a plan would seem to fit that takes it twice."""
    request = request_of("gpt-3", bare(cluster_of("cpu", 2)), 8, pinned=Pinned(recompute="none", micro_batches=1))
    least = search(request).plan.prediction.peak_bytes
    scarce = replace(request, memory_limit=0.5 * least)
    assert planned(replace(scarce, pinned=replace(scarce.pinned, offload=ANYTHING))).plan.prediction.offloaded
    with pytest.raises(InfeasibleError):
        planned(scarce)


def with_host(request: SearchRequest, memory: float) -> SearchRequest:
    """The request with these bytes of the host's memory for each device."""
    cluster = of_one_kind(request.cluster, "a host")
    assert cluster.host is not None
    return replace(request, cluster=replace(cluster, host=replace(cluster.host, memory=memory)))


def test_what_does_not_fit_otherwise_is_offloaded_in_some_blocks() -> None:
    """Between all on the device and all on the host: as many blocks as need be."""
    model = "llama-4"
    request = request_of(model, bare(cluster_of("h100-80gb", 8).with_devices(1)), 4)
    alone = search(request).plan.prediction
    hosted = search(replace(request, pinned=Pinned(offload=HOST))).plan.prediction
    middle = (alone.peak_bytes + hosted.peak_bytes) / 2
    found = search(replace(request, memory_limit=middle, pinned=Pinned(recompute="none", offload=ANYTHING))).plan
    homes = {stored.state_home for group in found.groups for _, stored in group.parameters}
    assert homes == {"device", "host"}
    assert 0 < dict(found.prediction.offloaded)["host"] < dict(hosted.offloaded)["host"]
    assert dict(found.prediction.time)["offload"] > 0


@pytest.mark.thorough
@pytest.mark.slow
def test_left_to_the_search_it_is_offloaded_where_nothing_fits_or_that_is_much_faster() -> None:
    request = request_of("llama-2", bare(cluster_of("h100-80gb", 8).with_devices(1)), 4)
    high = planned(request).plan.prediction.peak_bytes
    low = 0.0
    while high > 1.1 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if find_fitting(replace(request, memory_limit=middle)) else (middle, high)
    enough, little = replace(request, memory_limit=1.03 * high), replace(request, memory_limit=0.9 * low)
    assert not offload_of(planned(request).plan).stores
    found = planned(enough)
    assert found.on_devices_alone is not None or not offload_of(found.plan).stores
    found = planned(little)
    assert found.on_devices_alone is None
    assert offload_of(found.plan).stores == ("host",)
    assert found.plan == planned(replace(little, pinned=Pinned(offload=ANYTHING))).plan
    for excluded in (
        replace(little, pinned=Pinned(offload=NOTHING)),
        replace(little, cluster=replace(little.cluster, host=None)),
        replace(little, memory_limit=1.0),
    ):
        with pytest.raises(InfeasibleError) as error:
            planned(excluded)
        assert error.value.needed


def planned(request: SearchRequest) -> SearchResult:
    return plan_for(request, lambda _: None, lambda: False)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_activations_are_offloaded_where_they_do_not_fit(pipeline: int) -> None:
    """Below what recomputation alone can do; and nowhere where there is room."""
    cluster = bare(cluster_of("h100-80gb", 8).with_devices(pipeline))
    request = request_of("residual-8", cluster, 256, pinned=Pinned(pipeline=pipeline, micro_batches=8))
    offloading = replace(request.pinned, offload=Offload(activations=("device", "host")))
    roomy = search(replace(request, pinned=offloading))
    assert roomy.plan.prediction.objective_seconds == search(request).plan.prediction.objective_seconds
    assert not roomy.bound.offloaded_blocks

    low, high = 0.0, roomy.plan.prediction.peak_bytes  # where recomputation alone is no more enough
    while high > 1.01 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if find_fitting(replace(request, memory_limit=middle)) else (middle, high)
    found = search(replace(request, memory_limit=0.98 * low, pinned=offloading))
    assert found.bound.offloaded_blocks
    assert set(found.bound.offloaded_blocks.values()) == {"host"}
    assert found.plan.prediction.peak_bytes <= 0.98 * low * (1 + 1e-9)
    time = dict(found.plan.prediction.time)
    assert time["activation offload"] > 0
    assert time["offload under computation"] < 0
    assert found.bound_seconds <= found.plan.prediction.objective_seconds * (1 + 1e-9)


def test_what_blocks_save_is_offloaded_where_it_does_not_fit() -> None:
    """Between all on the device and all on the host: that of some blocks; and nowhere where there is room."""
    cluster = bare(cluster_of("h100-80gb", 8).with_devices(1))
    pinned = Pinned(micro_batches=8, recompute="none")
    request = request_of("residual-8", cluster, 256, pinned=pinned)
    either, always = (replace(pinned, offload=Offload(saved=homes)) for homes in (("device", "host"), ("host",)))
    alone = search(request).plan.prediction
    roomy = search(replace(request, pinned=either))
    assert roomy.plan.prediction.objective_seconds == alone.objective_seconds
    assert not roomy.bound.offloaded_blocks
    every = search(replace(request, pinned=always))
    assert sorted(every.bound.offloaded_blocks) == list(range(every.bound.blocks.count))
    assert every.plan.prediction.peak_bytes < alone.peak_bytes
    middle = (every.plan.prediction.peak_bytes + alone.peak_bytes) / 2
    found = search(replace(request, memory_limit=middle, pinned=either))
    assert 0 < len(found.bound.offloaded_blocks) < found.bound.blocks.count
    assert alone.objective_seconds < found.plan.prediction.objective_seconds
    assert found.plan.prediction.objective_seconds < every.plan.prediction.objective_seconds
    assert found.bound_seconds <= found.plan.prediction.objective_seconds * (1 + 1e-9)
    with pytest.raises(InfeasibleError):
        search(replace(request, memory_limit=middle))


def test_what_blocks_save_stays_where_the_search_gathers_by_block() -> None:
    """Ways to gather weights and homes may both be open: those that gather by block keep on the device what they
    save."""
    pinned = Pinned(micro_batches=1, recompute="none", pipeline=1, zero=3, offload=Offload(saved=("device", "host")))
    update = Update(buckets="none", gathers=AUTO_GATHERS)
    request = request_of("residual-8", bare(cluster_of("cpu", 2)), 256, pinned=pinned, update=update)
    roomy = search(request).plan.prediction.peak_bytes
    for share in (0.98, 0.8, 0.6):
        found = search(replace(request, memory_limit=share * roomy))
        assert found.bound.offloaded_blocks
        assert found.plan.training.update.gathers == "each"


def test_what_is_saved_comes_beside_the_work() -> None:
    """Behind the last of a row of blocks that offload, both passes wait."""
    pinned = Pinned(recompute="none")
    request = request_of("llama-4", bare(cluster_of("h100-80gb", 8).with_devices(1)), 4, pinned=pinned)
    graph = traced("llama-4")
    every = offloaded(loosened(bind(search(request).plan, graph, BATCH)), staying, saved="host")
    stays = (replace(group, activations_home="device") if group.first_block == 1 else group for group in every.groups)
    others = replace(every, groups=(every.groups[0], *tuple(stays)[1:]))
    for plan, blocks, waits in ((every, [0, 1, 2, 3], 1), (others, [0, 2, 3], 2)):
        (cost,) = stage_costs(bind(plan, graph, BATCH), request.cluster)
        assert [block for _, block in cost.away] == blocks
        fetch, store = cost.away[0, 3]
        assert cost.micro_batch["activation offload"] == pytest.approx((fetch + store) * len(blocks))
        (chunk,) = cost.chunks
        assert chunk.forward.beside == pytest.approx(store * (len(blocks) - waits))
        assert chunk.backward.beside == pytest.approx(fetch * (len(blocks) - waits))


def test_weights_are_offloaded_where_they_do_not_fit() -> None:
    """Between states on the host and the weights of all blocks, too: those of some blocks."""
    pinned = Pinned(micro_batches=1, recompute="none", offload=HOST)
    request = request_of("llama-4", bare(cluster_of("h100-80gb", 8).with_devices(1)), 4, pinned=pinned)
    hosted = search(request).plan.prediction
    every = search(replace(request, pinned=replace(pinned, offload=replace(HOST, weights=("host",))))).plan.prediction
    assert every.peak_bytes < hosted.peak_bytes
    middle = (every.peak_bytes + hosted.peak_bytes) / 2
    either = replace(pinned, offload=replace(HOST, weights=("device", "host")))
    found = search(replace(request, memory_limit=middle, pinned=either))
    away = {name for name, stored in found.bound.parameters.items() if stored.weight_offloaded}
    assert away
    assert all(found.bound.blocks.block_of(found.bound.graph.consumers[name][0]) is not None for name in away)
    assert (
        dict(hosted.offloaded)["host"] < dict(found.plan.prediction.offloaded)["host"] < dict(every.offloaded)["host"]
    )
    time = dict(found.plan.prediction.time)
    assert time["weight offload"] > 0
    assert time["weights going back"] > 0
    assert found.bound_seconds <= found.plan.prediction.objective_seconds * (1 + 1e-9)
    with pytest.raises(InfeasibleError):
        search(replace(request, memory_limit=middle))


def test_what_comes_beside_the_work_and_what_is_waited_for() -> None:
    """Of the blocks of a pass the first one, and each behind one whose weights stay."""
    request = request_of("llama-4", bare(cluster_of("h100-80gb", 8).with_devices(1)), 4)
    graph, homes = traced("llama-4"), ("", r"\.[02]\.")
    loose = loosened(bind(search(request).plan, graph, BATCH))
    plans = (offloaded(loose, staying, weights=of_blocks("host", which)) for which in homes)
    every, others = (stage_costs(bind(plan, graph, BATCH), request.cluster)[0] for plan in plans)
    assert sorted(every.fetched) == [0, 1, 2, 3]
    for cost, waits in ((every, 1), (others, 2)):
        fetch = cost.fetched[0]
        assert all(seconds == pytest.approx(fetch) for seconds in cost.fetched.values())
        assert cost.micro_batch["weight offload"] == pytest.approx(2 * fetch * len(cost.fetched))
        (chunk,) = cost.chunks
        for one_pass in (chunk.forward, chunk.backward):
            assert one_pass.beside == pytest.approx(fetch * (len(cost.fetched) - waits))
    host, bound = request.cluster.store("host"), bind(loose, graph, BATCH)
    sizes = [bound.graph.types[name].nbytes for name in block_parameters(bound.graph, bound.blocks, 0)]
    latency = request.cluster.device.launch_latency
    assert every.fetched[0] == pytest.approx(len(sizes) * latency + sum(sizes) / host.read)
    assert every.once["weights going back"] == pytest.approx(4 * (len(sizes) * latency + sum(sizes) / host.write))


@pytest.mark.slow
def test_the_host_may_be_full_too() -> None:
    """What would help is tried before it is named."""
    request = request_of("llama-4", bare(cluster_of("h100-80gb", 8).with_devices(1)), 4, pinned=Pinned(offload=HOST))
    full = with_host(request, 1000.0)
    with refused(InfeasibleError, "h100-80gb", "the 1,000 B of the host's memory"):
        search(full)
    assert "--offload auto" in " ".join(change.text for change in changes(full))


@pytest.mark.slow
def test_what_a_v_keeps_beyond_the_memory_of_hosts_is_left_on_the_devices() -> None:
    """The search counts what 1F1B keeps there. It refused such plans, though others fit that offload less."""
    offload = replace(ANYTHING, weights=("device",))
    pinned = Pinned(pipeline=2, schedule="zb_v", micro_batches=8, offload=offload)
    request = request_of("llama-4", bare(cluster_of("h100-80gb", 8).with_devices(2)), 16, pinned=pinned)
    limited = replace(request, memory_limit=0.9 * search(request).plan.prediction.peak_bytes)
    memory = 0.8 * dict(search(limited).plan.prediction.offloaded)["host"]
    found = search(with_host(limited, memory)).plan.prediction
    assert 0 < dict(found.offloaded)["host"] <= memory


def test_what_cannot_be_offloaded_is_refused() -> None:
    cluster = cluster_of("cpu", 2)
    with refused(RequestError, "offload", "LAMB", "--offload"):
        request_of("llama-2", cluster, 4, optimizer="lamb", pinned=Pinned(offload=HOST))
    with refused(RequestError, "offload", "pipedream", "--offload"):
        request_of("llama-2", cluster, 4, pinned=Pinned(schedule="pipedream", offload=HOST))
    with refused(UnknownKeyError, "cpu", "[host]"):
        request_of("llama-2", replace(cluster, host=None), 4, pinned=Pinned(offload=HOST))
    assert cluster.host is not None
    bare_host = replace(cluster, host=replace(cluster.host, disk=None))
    with refused(UnknownKeyError, "cpu", "[host.disk]"):
        request_of("llama-2", bare_host, 4, pinned=Pinned(offload=Offload(optimizer=("disk",))))
    with refused(RequestError, "offload", "weights", "weights", "--offload"):
        search(request_of("single-2", cluster, 4, pinned=Pinned(offload=Offload(weights=("host",)))))
    saved = Offload(saved=("host",))
    with refused(RequestError, "offload", "blocks", "blocks", "saved", "--offload"):
        search(request_of("single-2", cluster, 4, pinned=Pinned(offload=saved)))
    with refused(RequestError, "offload", "saved", "--offload", "--slices"):
        request_of("llama-2", cluster, 4, pinned=Pinned(schedule="seqpipe", offload=saved))
    assert request_of("llama-2", cluster, 4, pinned=Pinned(slices=2, offload=ANYTHING)).offload.saved == ("device",)
    with refused(RequestError, "offload", "saved", "--recompute full"):
        request_of("llama-2", cluster, 4, pinned=Pinned(recompute="full", offload=saved))
    with refused(RequestError, "offload", "activations", "--recompute none"):
        request_of("llama-2", cluster, 4, pinned=Pinned(recompute="none", offload=Offload(activations=("host",))))
    plan = search(request_of("llama-2", cluster, 4)).plan
    outside = (replace(group, activations_home="host") if not group.blocks else group for group in plan.groups)
    with refused(PlanFileError, "activations", "host"):
        bind(replace(plan, groups=tuple(outside)), traced("llama-2"), BATCH)
    lamb = replace(offloaded(plan, lambda _: "host"), training=replace(plan.training, optimizer="lamb"))
    with refused(PlanFileError, "host", "LAMB"):
        bind(lamb, traced("llama-2"), BATCH)
    text = dump_plan(offloaded(plan, lambda _: "host"))
    with refused(
        PlanFileError, "groups.0.parameters.model.embed_tokens.weight.state_home", "moon", "device", "host", "disk"
    ):
        parse_plan(text.replace('"state_home": "host"', '"state_home": "moon"', 1))


def test_words() -> None:
    assert parse_offload("none") == NOTHING
    assert parse_offload("auto") == parse_offload("optimizer:auto,activations:auto,saved:auto,weights:auto") == ANYTHING
    assert parse_offload("optimizer,weights:disk") == Offload(optimizer=("host",), weights=("disk",))
    assert parse_offload("activations") == Offload(activations=("host",))
    assert parse_offload("optimizer") == parse_offload("optimizer:host") == HOST
    assert parse_offload("optimizer:disk") == Offload(optimizer=("disk",))
    with refused(RequestError, "--offload", "optimiser", "optimizer"):
        parse_offload("optimiser")
    with refused(RequestError, "--offload optimizer,optimizer:disk"):
        parse_offload("optimizer,optimizer:disk")


@pytest.mark.slow
def test_where_memory_costs_much_of_a_step_offload_is_tried_and_taken_where_it_saves_as_much() -> None:
    """As far as the price of memory says, which is made up here, no longer than states that left would save."""
    decided = Pinned(pipeline=1, tensor=8, micro_batches=8, interleave=1, tensor_overlap=1)
    request = request_of("llama70b-4-layers", cluster_of("h100-80gb", 8), 64, precision="bf16", pinned=decided)
    hosted = search(replace(request, pinned=replace(decided, offload=HOST)))
    # blocks run again take longer than what is offloaded
    again = search(replace(request, pinned=replace(decided, recompute="full")))
    assert hosted.plan.prediction.step_seconds < again.plan.prediction.step_seconds * (1 - WORTH)
    asked = list[tuple[Offload | None, float]]()

    def tried(result: SearchResult, share: float, found: SearchResult = hosted, **other: object) -> SearchResult:
        """What comes of a result whose memory may save such a share, where that is found with offload."""
        best = result.plans[0]
        price = share * best.bounded / dict(best.plan.prediction.memory)["optimizer state"]
        dear = replace(result, plans=(replace(best, memory_price=price),))

        def solve(one: SearchRequest, cutoff: float) -> SearchResult:
            asked.append((one.pinned.offload, cutoff))
            return found

        found_so = with_faster_offload(replace(request, **other), dear, solve)  # type: ignore[arg-type]
        assert found_so.plan == dear.plan or found_so.on_devices_alone == dear.plans[0]
        return found_so

    assert tried(again, 0.06).plan == hosted.plan
    assert asked == [(ANYTHING, again.plans[0].bounded * (1 - WORTH))]
    exposed = _with_longer_stages(hosted, 2.0)  # an objective counts offload that a step overlaps
    assert exposed.plans[0].bounded > again.plans[0].bounded
    assert tried(again, 0.06, exposed).plan == exposed.plan
    asked.pop()
    alone = search(request)
    assert tried(alone, 0.06, again).plan == alone.plan  # what is found is slower
    assert tried(again, 0.06, alone).plan == again.plan  # or offloads nothing
    assert len(asked) == 3
    cpu = replace(request, cluster=cluster_of("cpu", 8), precision="fp32")
    for other in ({"pinned": replace(decided, offload=NOTHING)}, {"top": 2}, {"cluster": cpu.cluster}):
        assert tried(again, 0.06, **other).plan == again.plan
    assert tried(again, 0.04).plan == again.plan
    assert len(asked) == 3  # it was not even tried
    _searches_around_the_plan_without_offload_run_where_they_matter(request, again, hosted)


def _searches_around_the_plan_without_offload_run_where_they_matter(
    request: SearchRequest, alone: SearchResult, hosted: SearchResult
) -> None:
    best = alone.plans[0]
    price = best.bounded / dict(best.plan.prediction.memory)["optimizer state"]
    slow = hosted.plans[0].seconds / (1 - WORTH)
    dear = replace(alone, plans=(replace(best, memory_price=price),))

    def chosen(bound: float, refined: SearchResult, found: SearchResult = hosted) -> tuple[SearchResult, int]:
        """What comes of a result with this bound, and how often it was refined."""
        calls = list[SearchResult]()

        def refine(result: SearchResult, cutoff: float) -> SearchResult:
            assert cutoff in (math.inf, slow)  # from which on a plan on the devices alone would not be kept
            calls.append(result)
            return refined

        bounded = replace(dear, bound_seconds=bound)
        return with_faster_offload(request, bounded, lambda *_: found, refined=refine), len(calls)

    assert chosen(slow * 1.01, hosted)[1] == 0  # nothing on the devices alone is nearly as fast
    taken, calls = chosen(slow * 0.99, dear)
    assert (taken.plan, taken.on_devices_alone, calls) == (hosted.plan, dear.plans[0], 1)
    kept, calls = chosen(slow * 0.99, hosted)
    assert (kept.on_devices_alone, calls) == (None, 1)  # refined, it takes no longer than with offload
    assert chosen(0.0, alone, alone) == (alone, 1)  # offload is no faster


@pytest.mark.parametrize("model", ["llama-4", "few-experts", "perceptron"])
def test_where_memory_is_free_offload_saves_nothing(model: str) -> None:
    request = request_of(model, cluster_of("h100-80gb", 4), 8, precision="bf16")
    (alone, _), (hosted, _) = engine_of(request), engine_of(replace(request, pinned=Pinned(offload=ANYTHING)))
    for members in families_of(all_configurations(alone)):
        families = [family_of(engine, members) for engine in (alone, hosted)]
        bounds = [family.step_seconds(members) for family in families if family is not None]
        for least, found in zip(*bounds, strict=True):
            assert least == pytest.approx(found, rel=1e-12)


@pytest.mark.slow
def test_a_search_with_offload_begins_with_what_is_known_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """With bounds and tables. If it finds nothing as fast, that does not say that nothing fits: no rings are tried."""
    decided = Pinned(recompute="none", interleave=1, tensor_overlap=1)
    request = request_of("llama-4", cluster_of("h100-80gb", 16), 8, precision="bf16", pinned=decided)
    asked, opened = list[SearchRequest](), list[int]()

    def noted(one: SearchRequest, on_progress: Any, cancelled: Any, cutoff: float, shared: Shared, *known: Any) -> Any:
        asked.append(one)
        try:
            return best_plans(one, on_progress, cancelled, cutoff, shared, *known)
        finally:
            assert shared.made is not None
            opened.append(len(shared.made[0].built.builders))

    monkeypatch.setattr(objectives, "best_plans", noted)
    for module in (objectives, offloading):
        monkeypatch.setattr(module, "offload_may_win", lambda one, result: one.offload == NOTHING)
    result = planned(request)
    assert not offload_of(result.plan).stores
    assert [(one.offload, one.pinned.context_by) for one in asked] == [(NOTHING, None), (ANYTHING, None)]
    assert opened[1] < opened[0] / 2


def _with_longer_stages(result: SearchResult, times: float) -> SearchResult:
    """The result with stages that take several times as long, and the same step."""
    best, prediction = result.plans[0], result.plan.prediction
    stages = tuple(replace(one, micro_batch_seconds=times * one.micro_batch_seconds) for one in prediction.stages)
    plan = replace(result.plan, prediction=replace(prediction, stages=stages))
    return replace(result, plans=(replace(best, bound=replace(best.bound, plan=plan)),))


@pytest.mark.thorough
@pytest.mark.slow
def test_states_are_offloaded_where_recomputation_takes_longer() -> None:
    request = request_of("llama8b", cluster_of("h100-80gb", 8), 64, precision="bf16", memory_limit=24 * 2**30)
    found = planned(request)
    alone = planned(replace(request, pinned=Pinned(offload=NOTHING)))
    assert found.on_devices_alone is not None
    assert found.on_devices_alone.seconds <= alone.plan.prediction.step_seconds * 1.01  # which may be a simpler one
    assert found.plan.prediction.step_seconds < 0.95 * alone.plan.prediction.step_seconds
    assert "host" in {stored.state_home for group in found.plan.groups for _, stored in group.parameters}
