"""The pieces of the search and the prediction, which walks the whole graph, must price every plan alike.

Choices are drawn at random, not optimal, so that every candidate of every operator is met: any state of the boundary,
any way to run each block, any results kept, any division over the ranks. Seconds are the same to 1e-9. Bytes are the
same but where the search counts an upper bound of what blocks hand to each other (`bytes_of`).
"""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from costmodels import step_time
from hardware_profiles import PYTORCH, load_profile, load_software, software_names
from planner.plan.binding.bind import bind
from planner.plan.prediction.predict import predict, stage_costs
from planner.plan.prediction.step import covered_reductions
from planner.plan.prediction.walk.stage_cost import StageCost
from planner.plan.prediction.walk.walk import walks_of
from planner.plan.schedule import Moment, in_flight_of, moments_of
from planner.pricing.bucket_size import flat_bytes
from planner.sharding.update import Update
from planner.strategy_search.decomposition.crossings import crossing_seconds
from planner.strategy_search.decomposition.priced import State
from planner.strategy_search.engine.contenders import Contender
from planner.strategy_search.engine.outcome import Outcome, RankFilling
from planner.strategy_search.request.configurations import configurations
from planner.strategy_search.request.space import Configuration, Pinned
from tests.unit.search.cases import (
    BATCH,
    MODELS,
    Case,
    bytes_of,
    columns_of,
    make_case,
    plan_of,
    random_ranks,
    random_state,
    template_of,
    total,
    traced,
)

GLOBAL_BATCH = 24
CLUSTERS = (("cpu", 3), ("cpu", 4), ("h100-80gb", 2), ("h100-80gb", 8), ("h100-80gb", 16))
TOLERANCE = 1e-9


def cases(model: str, draw: random.Random) -> Iterator[Case]:
    """For each cluster a configuration of one stage, one of several, and one of virtual ones, where there are."""
    for profile, devices in CLUSTERS:
        space = list(configurations(template_of(model), devices, GLOBAL_BATCH, Pinned(virtual_stages=0)))
        pipelines = [c for c in space if c.pipeline > 1 and c.virtual_stages == 1]
        virtual = [c for c in space if c.virtual_stages > 1 and not c.uneven]  # these count with averages
        alone = [c for c in space if c.pipeline == 1]
        for configuration in (
            one for some in (alone, pipelines, virtual) for one in draw.sample(some, min(1, len(some)))
        ):
            precision, optimizer = draw.choice([("fp32", "adamw"), ("bf16", "sgd")])
            case = make_case(model, profile, configuration, GLOBAL_BATCH, precision, optimizer)
            if case.setting.chunks == 1 or not (case.chain.blocks_in_head or case.chain.blocks_in_tail):
                yield case


def same(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=TOLERANCE, abs_tol=1e-18)


def told(summed: float, judged: float, less: bool = False) -> bool:
    """Whether sums are what is judged; `less` says that they leave out what not all stages hand on."""
    return same(summed, judged) or (less and summed <= judged)


@pytest.mark.cases(2, 3)
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_any_plan_costs_what_the_prediction_says(model: str) -> None:
    draw = random.Random(model)
    for case in cases(model, draw):
        state = random_state(case, draw)
        check(case, state, random_ranks(case, draw, state))


@pytest.mark.cases(1, 3)
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_so_it_does_forward_only(model: str) -> None:
    """Of memory the pieces may count more: what the first stage makes for the last alone is there in both."""
    draw = random.Random(f"{model} forward")
    for profile, devices in CLUSTERS[1:]:
        pinned = Pinned(schedule="forward")
        space = list(configurations(template_of(model), devices, GLOBAL_BATCH, pinned))
        pipelines = [c for c in space if c.pipeline > 1]
        alone = [c for c in space if c.pipeline == 1]
        for configuration in (one for some in (alone, pipelines) for one in draw.sample(some, min(1, len(some)))):
            case = make_case(model, profile, configuration, GLOBAL_BATCH, recomputation=("none",))
            state = random_state(case, draw)
            check(case, state, random_ranks(case, draw, state), exact=False)


def check(case: Case, state: State, ranks: tuple[RankFilling, ...], *, exact: bool = True) -> None:
    bound = bind(plan_of(case, ranks), traced(case.model), BATCH)
    prediction = predict(bound, case.cluster)
    template = template_of(case.model)
    less = case.setting.ranks > 1 and template.passing != template.crossing
    assert same(math.fsum(value for _, value in prediction.time), prediction.step_seconds)
    assert same(math.fsum(value for _, value in prediction.memory), prediction.peak_bytes)
    parts, steps, ahead = [], [], 0.0
    for rank, walk in enumerate(walks_of(bound, case.cluster)):
        cost = walk.rank(rank)
        where = f"rank {rank} of {case.configuration} on {case.cluster.name}"
        columns = columns_of(case, ranks, rank)
        parts.append(total(columns, "part") + float(crossing_seconds(case.chain, case.setting, rank)[state]))
        steps.append(total(columns, "step"))
        assert told(parts[-1], math.fsum(cost.micro_batch.values()), less), where
        assert told(steps[-1], math.fsum(cost.once.values())), where
        passed = [one.work + one.waits for chunk in cost.chunks for one in (chunk.forward, chunk.backward)]
        assert told(parts[-1], math.fsum((*passed, cost.ahead)), less), where
        ahead += cost.ahead
        waiting = moments_of(bound.plan, rank)[0].waiting
        counts = case.setting.in_flight[rank] if case.setting.chunks > 1 else in_flight_of(bound.plan, rank)
        counted = walk.rank(rank, [Moment(counts, waiting)])  # as the search counts: chunks on average over moments
        check_bytes(case, state, ranks, rank, counted, where, exact=exact)
        assert math.fsum(counted.memory.values()) <= math.fsum(cost.memory.values()) * (1 + TOLERANCE), where
    seconds = step_time(parts, steps, case.setting.micro_batches, case.setting.chunks)
    assert told(float(seconds), prediction.objective_seconds, less), case.configuration
    contender = Contender(
        configuration=case.configuration,
        outcome=Outcome(
            seconds=prediction.objective_seconds, bound=0.0, state=state, ranks=ranks, least=0.0, price=0.0, solved=0
        ),
        pipeline_of_kinds=case.pipeline_of_kinds,
    )
    in_turn = prediction.step_seconds + case.setting.micro_batches * ahead
    assert contender.least_step() <= in_turn * (1 + TOLERANCE), case.configuration
    if case.setting.chunks == 1:
        assert prediction.step_seconds <= prediction.objective_seconds * (1 + TOLERANCE), case.configuration
    if case.setting.ranks == 1:
        assert same(in_turn, contender.least_step())


def check_bytes(
    case: Case,
    state: State,
    ranks: tuple[RankFilling, ...],
    rank: int,
    cost: StageCost,
    where: str,
    *,
    exact: bool = True,
) -> None:
    counted, doubtful = bytes_of(case, state, ranks, rank)
    judged = math.fsum(cost.memory.values())
    assert judged <= counted * (1 + TOLERANCE), where
    assert not exact or counted - doubtful <= judged * (1 + TOLERANCE), where
    assert same(max(c.amounts.transient for c in columns_of(case, ranks, rank)), cost.memory["transient"]), where


@pytest.mark.cases(2)
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("model", ["llama-4", "post-norm", "chain-from-input", "gpt-4-tied"])
def test_stages_whose_blocks_are_run_alike_are_priced_exactly(model: str, pipeline: int) -> None:
    draw = random.Random(3)
    case = make_case(model, "h100-80gb", Configuration(pipeline=pipeline, mesh=(2,), micro_batches=4), 8)
    for _ in range(8):
        state = random_state(case, draw)
        ranks = random_ranks(case, draw, state)
        costs = stage_costs(bind(plan_of(case, ranks), traced(model), BATCH), case.cluster)
        for rank, cost in enumerate(costs):
            if len({column.recompute for column in ranks[rank].inner}) == 1:
                counted, _ = bytes_of(case, state, ranks, rank)
                assert same(counted, math.fsum(cost.memory.values()))


def test_the_way_around_is_longer_than_the_way_on() -> None:
    """Four ranks of 4 devices of which 8 are a node: from the last back to the first it is another link."""
    configuration = Configuration(pipeline=4, virtual_stages=2, mesh=(4,), micro_batches=4)
    case = make_case("residual-8", "h100-80gb", configuration, 16)
    crossing = case.chain.crossing
    assert (crossing.forward_around > crossing.forward).all()
    draw = random.Random(0)
    for _ in range(3):
        state = random_state(case, draw)
        check(case, state, random_ranks(case, draw, state))


@pytest.mark.parametrize(
    ("zero_by", "optimizer"), [("parameters", "adamw"), ("parameters", "muon"), ("servers", "sgd")]
)
@pytest.mark.parametrize(("model", "pipeline"), [("llama-4-words", 1), ("post-norm", 2)])
def test_sums_of_states_with_owners_are_no_more_than_the_prediction(
    zero_by: str, optimizer: str, model: str, pipeline: int
) -> None:
    """The search counts the mean device, the plan the one that updates longest: an owner of many small weights, or of
    matrices, takes longer than that of a large embedding."""
    configuration = Configuration(pipeline=pipeline, mesh=(4,), micro_batches=4)
    case = make_case(model, "h100-80gb", configuration, 16, "bf16", optimizer, update=Update(zero_by=zero_by))
    draw, less = random.Random(0), 0
    for _ in range(4):
        state = random_state(case, draw)
        ranks = random_ranks(case, draw, state)
        for rank, cost in enumerate(stage_costs(bind(plan_of(case, ranks), traced(model), BATCH), case.cluster)):
            summed, judged = total(columns_of(case, ranks, rank), "step"), math.fsum(cost.once.values())
            assert summed <= judged * (1 + TOLERANCE)
            less += summed < judged * (1 - TOLERANCE)
    assert less


@pytest.mark.parametrize("mesh", [(3, 2), (2, 3)])
def test_padded_shards_are_priced_exactly(mesh: tuple[int, ...]) -> None:
    """Three devices do not divide a width of 32; weights go several ways to their readers, not all of which send
    padding."""
    case = make_case("llama-4", "h100-80gb", Configuration(pipeline=1, mesh=mesh, micro_batches=2), 12)
    draw = random.Random(1)
    for _ in range(3):
        state = random_state(case, draw)
        check(case, state, random_ranks(case, draw, state))


@pytest.mark.slow
@pytest.mark.thorough
def test_the_cases_are_of_all_forms() -> None:
    """Blocks in the head, in the tail, in neither; nothing repeated; last blocks that keep less than the others."""
    forms = set()
    for model in MODELS:
        chain = make_case(model, "cpu", Configuration(pipeline=1, mesh=(2,), micro_batches=2), 8).chain
        forms.add((len(chain.inner) > 0, chain.blocks_in_head, chain.blocks_in_tail, bool((chain.ending < 0).any())))
    assert {form[:3] for form in forms} == {(False, 0, 0), (True, 0, 0), (True, 1, 0), (True, 0, 1)}
    assert {form[3] for form in forms} == {False, True}


@pytest.mark.cases(2, 4)
@pytest.mark.parametrize("stack", [name for name in software_names() if name != PYTORCH.name])
@pytest.mark.parametrize(("model", "mesh", "pipeline"), [("llama-4", (2, 2), 1), ("gpt-4-tied", (4,), 2)])
def test_stacks_are_priced_alike(stack: str, model: str, mesh: tuple[int, ...], pipeline: int) -> None:
    """What a stack keeps, gathers and overwrites; buffers are counted by the prediction alone."""
    draw = random.Random(stack)
    configuration = Configuration(pipeline=pipeline, mesh=mesh, micro_batches=4)
    software = replace(load_software(stack), recomputed_in_backward=("attention",))
    cluster = load_profile("h100-80gb").with_devices(pipeline * math.prod(mesh)).with_software(software)
    case = make_case(model, cluster, configuration, 16, "bf16")
    for _ in range(4):
        state = random_state(case, draw)
        ranks = random_ranks(case, draw, state)
        costs = stage_costs(bind(plan_of(case, ranks), traced(model), BATCH), case.cluster)
        for rank, cost in enumerate(costs):
            cost.memory["transient"] -= software.buffers
            check_bytes(case, state, ranks, rank, cost, f"rank {rank} with {stack}")


@pytest.mark.parametrize(
    ("model", "stack"),
    [("mixture-after-dense", "fsdp"), ("aside", "hai-llm"), ("aside", "megatron"), ("chain-from-input", "fsdp")],
)
def test_what_only_some_blocks_have_is_priced_alike_for_stacks(model: str, stack: str) -> None:
    """A piece that has a block and what stands beside the blocks has the weights of one of them at a time; what the end
    reads of the last block, and keeps nothing of, is kept in pieces there as in all others."""
    draw = random.Random(stack)
    software = load_software(stack)
    for pipeline, mesh in ((1, (2, 2)), (2, (4,))):
        cluster = load_profile("h100-80gb").with_devices(pipeline * math.prod(mesh)).with_software(software)
        case = make_case(model, cluster, Configuration(pipeline=pipeline, mesh=mesh, micro_batches=4), 16, "bf16")
        for _ in range(6):
            state = random_state(case, draw)
            ranks = random_ranks(case, draw, state)
            costs = stage_costs(bind(plan_of(case, ranks), traced(model), BATCH), case.cluster)
            for rank, cost in enumerate(costs):
                cost.memory["transient"] -= software.buffers
                check_bytes(case, state, ranks, rank, cost, f"rank {rank} with {stack}")


SAVES = (
    ("fsdp", {"keeps_fp8": True}),
    ("fsdp", {"remakes": ("normalisation", "experts")}),
    ("hai-llm", {"keeps_fp8": True, "remakes": ("normalisation", "experts")}),
    ("megatron", {"keeps_fp8": True, "modules": True, "fused": True}),
    ("pytorch", {"keeps_fp8": True}),
    ("pytorch", {"remakes": ("normalisation",), "views_heads": True}),
    ("paddle", {"copies_inputs": True}),
    ("pytorch", {"copies_inputs": True, "remakes": ("normalisation",)}),
)
"""Stacks that keep values otherwise than as they are (`planner.pricing.kept_shares`)."""


@pytest.mark.cases(2, 6)
@pytest.mark.parametrize(("stack", "keeps"), SAVES, ids=str)
@pytest.mark.parametrize("model", ["llama-4", "post-norm", "kinds-one-after", "mixture", "gpt-4-tied"])
def test_what_stacks_keep_otherwise_is_priced_alike(model: str, stack: str, keeps: dict[str, Any]) -> None:
    """Blocks of kinds that read otherwise what the one before hands on count the most that any keeps."""
    draw = random.Random(f"{model} {stack}")
    software = replace(load_software(stack), **keeps)
    for pipeline, mesh in ((1, (2, 2)), (2, (4,))):
        configuration = Configuration(pipeline=pipeline, mesh=mesh, micro_batches=4)
        cluster = load_profile("h100-80gb").with_devices(pipeline * math.prod(mesh)).with_software(software)
        case = make_case(model, cluster, configuration, 16, "bf16")
        for _ in range(4):
            state = random_state(case, draw)
            ranks = random_ranks(case, draw, state)
            costs = stage_costs(bind(plan_of(case, ranks), traced(model), BATCH), case.cluster)
            for rank, cost in enumerate(costs):
                cost.memory["transient"] -= software.buffers
                where = f"rank {rank} with {stack} that has {keeps}"
                check_bytes(case, state, ranks, rank, cost, where, exact=model != "kinds-one-after")


@pytest.mark.cases(1)
@pytest.mark.parametrize("wait", [True, False])
def test_what_stages_send_in_parts_is_priced_alike(wait: bool) -> None:
    """Each device sends a part of what others hold too, and the receivers gather it."""
    draw = random.Random(int(wait))
    software = replace(PYTORCH, scatter_gather=True, waits_to_send=wait)
    cluster = load_profile("h100-80gb").with_devices(8).with_software(software)
    case = make_case("llama-4", cluster, Configuration(pipeline=2, mesh=(2, 2), micro_batches=4), 16)
    whole = make_case("llama-4", "h100-80gb", Configuration(pipeline=2, mesh=(2, 2), micro_batches=4), 16)
    assert (case.chain.crossing.forward != whole.chain.crossing.forward).any()
    for _ in range(8):
        state = random_state(case, draw)
        check(case, state, random_ranks(case, draw, state))


UPDATES = (
    Update(buckets="none", gradient_dtype="fp32", clip_norm=1.0),
    Update(gradient_dtype="parameter", master_weights=False, buckets="auto"),
    Update(buckets=2**16, local_parameters=("*[1m].weight",)),
    Update(buckets=2**30),
)


@pytest.mark.cases(1, 4)
@pytest.mark.parametrize("optimizer", ["lamb", "muon"])
@pytest.mark.parametrize("update", UPDATES, ids=str)
@pytest.mark.parametrize(
    ("model", "mesh", "pipeline"), [("llama-4", (2, 2), 1), ("gpt-4-tied", (4,), 2), ("residual-first", (2, 2), 1)]
)
def test_updates_are_priced_alike(
    update: Update, model: str, mesh: tuple[int, ...], pipeline: int, optimizer: str
) -> None:
    """The sums that the search minimises count a message at its share of a full bucket, and no norms. The prediction
    counts the same in its sums, and beside them (`StageCost.beyond`) what buckets and norms really take, which is never
    less; that is in the step alone. Flat buffers are counted by the prediction alone."""
    draw = random.Random(model)
    configuration = Configuration(pipeline=pipeline, mesh=mesh, micro_batches=4)
    case = make_case(model, "h100-80gb", configuration, 16, "bf16", optimizer, update=update)
    for _ in range(4):
        state = random_state(case, draw)
        ranks = random_ranks(case, draw, state)
        bound = bind(plan_of(case, ranks), traced(model), BATCH)
        parts, steps = [], []
        for rank, cost in enumerate(stage_costs(bound, case.cluster)):
            columns = columns_of(case, ranks, rank)
            parts.append(total(columns, "part") + float(crossing_seconds(case.chain, case.setting, rank)[state]))
            steps.append(total(columns, "step"))
            assert same(parts[-1], math.fsum(cost.micro_batch.values()))
            assert same(steps[-1], math.fsum(cost.once.values()))
            assert all(seconds >= -1e-15 for seconds in cost.beyond.values())
            assert math.fsum(cost.beyond.values()) > 0
            largest = max(column.amounts.transient for column in columns)
            limit = flat_bytes(bound.graph, case.chain.tables.update)
            assert -TOLERANCE <= cost.memory["transient"] - largest <= limit * (1 + TOLERANCE)
            cost.memory["transient"] = largest
            check_bytes(case, state, ranks, rank, cost, str(update))
            share = covered_reductions(cost.chunks) / max(1e-30, cost.all_once["gradient reduction"] - cost.copied)
            steps[-1] -= (cost.once["gradient reduction"] - cost.copied) * min(1.0, share)
        prediction = predict(bound, case.cluster)
        seconds = step_time(parts, steps, case.setting.micro_batches, case.setting.chunks)
        assert same(float(seconds), prediction.objective_seconds)
        assert same(math.fsum(value for _, value in prediction.time), prediction.step_seconds)
        assert same(math.fsum(value for _, value in prediction.memory), prediction.peak_bytes)
