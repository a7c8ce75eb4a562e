"""How much kernels count beside launches: by the quickest choice of all operators, found exactly."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

import planner
from hardware_profiles import Cluster
from planner.api.searching import search
from planner.sharding.update import AHEAD, Update
from planner.strategy_search.decomposition.lagrangian import Multipliers
from planner.strategy_search.decomposition.setting import Setting
from planner.strategy_search.engine import family as families
from planner.strategy_search.engine.engine import Engine
from planner.strategy_search.engine.evaluation import NO_HINT
from planner.strategy_search.engine.families import family_of
from planner.strategy_search.finalists.proofs import bounded_seconds
from planner.strategy_search.request.bounds import bounds
from planner.strategy_search.request.space import Configuration, Pinned
from planner.strategy_search.tables.cost_table import CostTables, OperatorTable
from planner.strategy_search.tables.launches import kernels_of, kernels_shares, of_cheapest
from tests.unit.search.cases import BATCH, cluster_of, make_case, request_of, template_of
from tests.unit.search.test_block_gathers import check_bound


def tables_of(model: str) -> CostTables:
    """Tables whose kernels do not wait for launches, on two devices."""
    tables = make_case(model, "h100-80gb", Configuration(pipeline=1, mesh=(2,), micro_batches=4), 8).chain.tables
    return replace(tables, operators=tuple(launched(table, 0.0) for table in tables.operators))


def launched(table: OperatorTable, seconds: float) -> OperatorTable:
    """An operator that a host takes so long to launch, of whose kernels none waits for that."""
    prices, size = table.prices, len(table.candidates.strategies)
    (there, back), host = prices.late, np.full(size, seconds)
    kernels = replace(
        prices,
        forward=prices.forward - there,
        backward=prices.backward - back,
        late=(np.zeros(size), np.zeros(size)),
        host=(host, host),
    )
    return replace(table, prices=kernels)


def slowed(profile: str, share: float) -> Cluster:
    """Four devices whose hosts take a share of the time to launch a kernel."""
    cluster = cluster_of(profile, 4)
    return replace(cluster, device=replace(cluster.device, host_latency=share * cluster.device.host_latency))


def proved(engine: Engine, configuration: Configuration) -> float:
    """What an engine proves of a configuration by its own way to count launches."""
    return min(engine.evaluate_as(way, configuration).bound for way in engine.gathers)


def least_seconds(tables: CostTables) -> float:
    """What the cheapest choice takes."""
    kernels = kernels_of(tables.template, tables.operators, tables.edges)
    return sum(float(there + back) for there, back in of_cheapest(tables.template, kernels, tables.edges))


def quickest(tables: CostTables) -> float:
    """The least seconds of kernels and messages of the blocks in a row, every choice tried."""
    template, operators = tables.template, tables.operators
    own = [at for at in range(len(operators)) if at not in template.twins]
    place = {at: own.index(template.twins.get(at, at)) for at in range(len(operators))}
    blocks, best = template.blocks.count, np.inf
    for choice in itertools.product(*(range(len(operators[at].candidates.strategies)) for at in own)):
        seconds = 0.0
        for at, operator in enumerate(operators):
            prices, taken = operator.prices, choice[place[at]]
            every = (prices.forward, prices.backward, prices.inner_forward, prices.inner_backward)
            seconds += (blocks if template.in_block(at) else 1) * sum(float(each[taken]) for each in every)
        for table in tables.edges:
            edge, cell = table.edge, (choice[place[table.edge.producer]], choice[place[table.edge.consumer]])
            times = {"inside": blocks, "loop": blocks - 1, "enter": 1, "leave": 1, "outside": 1}[edge.kind]
            seconds += times * float(table.forward[cell] + table.backward[cell])
        best = min(best, seconds)
    return best


@pytest.mark.parametrize("model", ["perceptron", "chain", "single-2"])
def test_the_quickest_choice_is_found(model: str) -> None:
    tables = tables_of(model)
    found = least_seconds(tables)
    assert found == pytest.approx(quickest(tables), rel=1e-9)


def test_kernels_count_in_full_where_no_choice_is_as_quick_as_its_launches() -> None:
    tables = tables_of("chain")
    template = tables.template
    number = 2 * sum(template.times(at) for at in range(len(tables.operators)))  # of launches, in both passes
    least = least_seconds(tables) / number
    for share, longer in ((0.999, True), (1.001, False)):
        operators = tuple(launched(table, share * least) for table in tables.operators)
        together, _ = kernels_shares(template, operators, tables.edges)
        assert len(set(together.values())) == 1
        assert (together[None] == (1.0, 1.0)) == longer


def test_blocks_that_count_apart_have_shares_of_their_own() -> None:
    """Here hosts are slow outside of blocks."""
    tables = tables_of("chain")
    template = tables.template
    slow = [launched(table, 1.0) for table in tables.operators]
    operators = tuple(table if template.in_block(at) else slow[at] for at, table in enumerate(tables.operators))
    together, apart = kernels_shares(template, operators, tables.edges)
    assert apart is not None
    assert apart[0] == (1.0, 1.0)
    assert max(apart[None]) < 1
    assert max(map(max, together.values())) < 1


@pytest.mark.parametrize(("pipeline", "micro_batches"), [(1, 1), (2, 2), (1, 2)])
def test_what_proves_more_of_a_configuration_decides(pipeline: int, micro_batches: int) -> None:
    """Hosts that are slow for some blocks; in a single stage they catch up with the next micro-batch."""
    cluster = slowed("h100-80gb", 0.28)
    update = Update(buckets="none", gathers="ahead")
    request, template = request_of("chain", cluster, 16, precision="bf16", update=update), template_of("chain")
    limits = (bounds(template, BATCH, cluster, request.precision, request.optimizer),)
    engine = Engine(request=request, template=template, limits=limits)
    configuration = Configuration(pipeline=pipeline, mesh=(4 // pipeline,), micro_batches=micro_batches)
    found = engine.evaluate(configuration)
    together, apart = (proved(one, configuration) for one in (engine, engine.launched_apart))
    assert apart > together
    assert found.apart == (pipeline > 1 or micro_batches == 1)
    assert found.bound == (apart if found.apart else together)


@pytest.mark.cases(0, 4)
@pytest.mark.parametrize("slower", [0.5, 0.35, 0.7])
@pytest.mark.parametrize(("pipeline", "micro_batches"), [(1, 1), (1, 4), (2, 1), (2, 4), (1, None)])
@pytest.mark.parametrize("model", ["llama-4", "kinds-in-turn", "mixture-after-dense"])
def test_no_plan_takes_less_than_a_bound_of_blocks_that_launch_apart(
    model: str, pipeline: int, micro_batches: int | None, slower: float
) -> None:
    """Hosts of which some blocks wait, and others do not; of all numbers of micro-batches, too, which the largest
    bounds."""
    pinned = Pinned(pipeline=pipeline, micro_batches=micro_batches)
    check_bound(slowed("h100-80gb", slower), 1, pinned, Update(buckets="none", gathers="ahead"), model)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_messages_that_every_plan_has_are_proved_of_all() -> None:
    """Statistics of batches are summed up in every layer: each can be without, but not all."""
    found = search("resnet50", "h100-80gb", devices=64, pinned={"pipeline": 1, "mesh": (64,), "micro_batches": 1})
    assert found.gap < 0.05


def test_launches_bound_small_micro_batches_as_they_are_counted_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts so slow that a micro-batch takes as long however small it is: what its k-th part of the largest proves is
    next to nothing."""
    cluster = slowed("h100-80gb", 1e3)
    update = Update(buckets="none", gathers="ahead")
    request, template = request_of("chain", cluster, 16, precision="bf16", update=update), template_of("chain")
    limits = (bounds(template, BATCH, cluster, request.precision, request.optimizer),)
    engine = Engine(request=request, template=template, limits=limits)
    members = tuple(Configuration(pipeline=2, mesh=(2,), micro_batches=m) for m in (1, 2, 4, 8))
    family = family_of(engine, members)
    assert family is not None
    every = family.step_seconds(members)
    for member, least in zip(members, every, strict=True):
        bound = min(proved(engine, member), proved(engine.launched_apart, member))
        assert 0.9 * bound < least <= bound * (1 + 1e-9)
        assert family.priced_seconds(member, NO_HINT, cutoff=least / 2) == pytest.approx(least, rel=0.1)
    numbers, first_bounds = list[int](), families.first_bounds

    def noted(asked: Sequence[tuple[Multipliers, Setting]]) -> None:
        numbers.append(len(asked))
        first_bounds(asked)

    monkeypatch.setattr(families, "first_bounds", noted)
    assert family.step_seconds(members, cutoff=every[0] * 0.9) == pytest.approx(every, rel=0.1)  # by launches
    assert family.step_seconds(members, [every[-1]] * len(members), every[-1]) == [every[-1]] * len(members)
    family.step_seconds(members, cutoff=every[0] * 1.1)
    assert numbers == [0, 0, 1]


def test_other_ways_to_gather_are_not_asked_where_weights_ahead_take_too_long_whatever_the_memory() -> None:
    cluster = cluster_of("h100-80gb", 4)
    request, template = request_of("llama-4", cluster, 16, precision="bf16"), template_of("llama-4")
    limits = (bounds(template, BATCH, cluster, request.precision, request.optimizer),)
    configuration = Configuration(pipeline=1, mesh=(4,), micro_batches=1)
    engines = [Engine(request=request, template=template, limits=limits) for _ in range(2)]
    assert len(engines[0].gathers) > 1
    cutoff = engines[0].evaluate(configuration).seconds / 2
    alone = engines[1].evaluate_as(AHEAD, configuration, cutoff=cutoff)
    found = engines[1].evaluate(configuration, cutoff=cutoff)
    assert cutoff <= alone.free == found.bound < alone.free * 2
    assert found.solved <= alone.solved
    assert not found.ranks


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("decided", [{"data": 4}, {"tensor": 4}, {"data": 2, "tensor": 2}, {"pipeline": 4}])
def test_launches_for_gradients_of_parameters_are_in_bounds(decided: dict[str, int]) -> None:
    """Weights of 16 bits, whose gradients are cast one by one, on hosts that take longer than all kernels."""
    asked = {"model": "gpt-tiny", "hardware": "h100-80gb", "devices": 4, "global_batch": 16, "precision": "bf16"}
    free = search(**asked)
    for micro_batches in (1, 4):
        found = search(**asked, pinned={"pipeline": 1, **decided, "micro_batches": micro_batches})
        least = bounded_seconds(found.plan) * (1 + 1e-9)
        assert found.bound_seconds <= least
        assert free.bound_seconds <= least
        assert found.bound_seconds > 0.8 * least


@pytest.mark.slow
@pytest.mark.thorough
def test_what_a_host_launches_ahead_of_slices_is_in_no_bound() -> None:
    """A plan whose step was below the bound was called optimal: slices may save more of the launches of a stack than
    sums say."""
    found = planner.search(
        "qwen3-8b+num_layers=4", "ascend-910b-64gb", devices=16, software="megatron", global_batch=32,
        pinned={"tensor": 2, "slices": 2}, simplicity=0.0,
    )  # fmt: skip
    assert any(stage.ahead_seconds for stage in found.plan.prediction.stages)
    assert found.bound_seconds < found.plan.prediction.step_seconds
