"""Whatever lies in the space of an engine is written without a loss, read back as it was, and fits where it was said to
fit."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware_profiles import load_profile, load_software, of_one_kind
from planner.api.carrying import Subject, plan_of
from planner.api.exporting import check_told
from planner.engines.fsdp import TORCHTITAN
from planner.engines.space import EngineSpace
from planner.engines.spaces import SPACES
from planner.errors import RequestError
from planner.export.architecture import architecture_of
from planner.export.describe import describe, differences
from planner.export.target import Facts, Job
from planner.export.targets import TARGETS
from planner.graph.trace import trace
from planner.models.zoo import build_model
from planner.plan.outline import model_reference
from planner.sharding.update import DEFAULT
from planner.strategy_search.engine.families import all_configurations, engine_of
from planner.strategy_search.finalists.proofs import Ranked
from planner.strategy_search.fixed import fixed_schedule
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration, Pinned
from planner.strategy_search.result import SearchResult
from planner.strategy_search.search import search
from planner.strategy_search.within import _as_run, best_plans, plan_within, within
from tests.refusals import refused

MODEL, DEVICES = "llama-tiny", 8


@cache
def request_for(engine: str, model: str = MODEL) -> SearchRequest:
    """A request for a toy model on eight devices."""
    space = SPACES[engine]
    cluster = load_profile("h100-80gb").with_devices(DEVICES).with_software(load_software(space.software))
    built = build_model(model, dtype="bfloat16")
    graph = trace(built.module, built.args, built.kwargs)
    reference = model_reference(graph, name=model, sequence_length=built.sequence_length, batch=built.batch)
    return SearchRequest(graph=graph, batch=built.batch, model=reference, cluster=cluster, global_batch=32, space=space)


@cache
def configurations(engine: str, model: str = MODEL) -> tuple[Configuration, ...]:
    """All that the space of an engine has for that."""
    request = request_for(engine, model)
    return tuple(all_configurations(engine_of(within(SPACES[engine], request))[0]))


@pytest.mark.cases(1)
@pytest.mark.parametrize("engine", SPACES)
def test_configurations_come_in_one_order(engine: str) -> None:
    found = configurations(engine)
    assert len({configuration.tie for configuration in found}) == len(found)


@pytest.mark.cases(2, 8)
@pytest.mark.parametrize("engine", ["megatron", "torchtitan", "mindspeed", "nemo", "megatron-bridge", "deepspeed"])
def test_samples_divide_as_an_engine_cuts_them(engine: str) -> None:
    """Megatron-LM, megatron/training/arguments.py, validate_args: a multiple of 2 x context; torchtitan,
    distributed/parallel_dims.py, seq_len_divisor: of 2 x context x tensor. 36 tokens divide over 4 devices alone."""
    space, length = SPACES[engine], 36
    asked, built = request_for(engine), build_model(MODEL, dtype="bfloat16", sequence_length=length)
    graph = trace(built.module, built.args, built.kwargs)
    request = replace(asked, graph=graph, batch=built.batch, model=replace(asked.model, sequence_length=length))
    found = all_configurations(engine_of(within(space, request))[0])
    degrees = {(math.prod(one.context), dict(zip(one.roles, one.mesh, strict=True)).get("tensor", 1)) for one in found}
    steps = {"deepspeed": lambda context, _: context, "torchtitan": lambda context, tensor: 2 * context * tensor}
    step = steps.get(engine, lambda context, _: 2 * context if context > 1 else 1)
    assert degrees
    assert {length % step(*pair) for pair in degrees} == {0}
    assert ((4, 1) in degrees) == (engine == "deepspeed")
    if engine != "deepspeed":
        with refused(RequestError, f"--for {engine}", "context 4", length, 40):
            within(space, replace(request, pinned=Pinned(context=4)))


@pytest.mark.parametrize("engine", ["megatron", "mindspeed", "mindformers", "torchtitan"])
def test_rings_are_searched_where_they_split_the_attention_of_a_model(engine: str) -> None:
    """BERT masks padding, which no ring does: `--for megatron` found a plan with a ring, and stopped with it."""
    found = configurations(engine, "bert-tiny")
    assert found
    assert {one.context[0] for one in found} == {1}


@pytest.mark.cases(2)
@pytest.mark.parametrize("engine", SPACES)
def test_moments_in_16_bits_are_searched_where_an_engine_is_told_of_them(engine: str) -> None:
    space = SPACES[engine]
    asked = replace(request_for(engine), update=replace(DEFAULT, moment_dtype="bf16"))
    if not space.narrow_moments:
        with refused(RequestError, f"--for {engine}", "moment_dtype", "bf16"):
            within(space, asked)
        return
    found = within(space, asked)
    assert found.update.moment_dtype == "bf16"
    assert {one.zero for one in found.alternatives} == {*space.narrow_moments}
    with refused(RequestError, "moment_dtype", "AdamW in 16 bits"):
        within(space, replace(asked, precision="fp32"))


def recomputed(draw: st.DrawFn, space: EngineSpace, configuration: Configuration, stages: list[int]) -> tuple[int, ...]:
    """Recomputed blocks of every stage, as far as a configuration has them open."""
    decided = configuration.decided
    assert decided is not None
    if decided.recompute is not None:
        return (0,) * len(stages) if decided.recompute == "none" else tuple(stages)
    assert space.name in ("megatron", "megatron-bridge", "nemo", "mindspeed", "mindformers", "torch")
    return tuple(draw(st.integers(0, blocks)) for blocks in stages)


@pytest.mark.cases(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize("engine", SPACES)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_what_lies_in_a_space_is_written_and_read_back(engine: str, data: st.DataObject) -> None:
    space = SPACES[engine]
    configuration = data.draw(st.sampled_from(configurations(engine)))
    count = configuration.pipeline * configuration.virtual_stages
    stages = [4 // count] * count
    if count == 2 and configuration.virtual_stages == 1 and not configuration.even and data.draw(st.booleans()):
        stages = [1, 3]
    full = data.draw(st.composite(lambda draw: recomputed(draw, space, configuration, stages))())
    check_written_and_read(engine, configuration, stages, full)


HYBRID = [engine for engine, space in SPACES.items() if any(settings.replicated for settings in space.settings)]


@pytest.mark.cases(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize("engine", HYBRID)
def test_copies_of_what_is_shared_out_are_written_and_read_back(engine: str) -> None:
    found = [one for one in configurations(engine) if one.decided and (one.decided.replicas or 1) > 1]
    assert {one.mesh[0] for one in found} == {2, 4}, "copies are the outermost axis"
    check_written_and_read(engine, found[-1], [4], (0,))


@pytest.mark.cases(1, 2)
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["mindformers", "torchtitan"])
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_experts_are_written_and_read_back(engine: str, data: st.DataObject) -> None:
    """The model has four blocks, each with eight experts."""
    found = [one for one in configurations(engine, "mixtral-tiny") if one.decided and (one.decided.expert or 1) > 1]
    configuration = data.draw(st.sampled_from(found))
    count = configuration.pipeline * configuration.virtual_stages
    stages = [4 // count] * count
    full = data.draw(st.composite(lambda draw: recomputed(draw, SPACES[engine], configuration, stages))())
    check_written_and_read(engine, configuration, stages, full, "mixtral-tiny")


def test_torchtitan_cuts_experts_over_whole_contexts_within_copies() -> None:
    """Its mesh has experts on the innermost devices (distributed/parallel_dims.py, 0.2.2)."""
    cut = [one for one in configurations("torchtitan", "mixtral-tiny") if one.decided and (one.decided.expert or 1) > 1]
    for one in cut:
        degrees = dict(zip(one.roles, one.mesh, strict=True))
        context, tensor = degrees.get("ring", 1), degrees.get("tensor", 1)
        shards = DEVICES // one.pipeline // tensor // degrees.get("replica", 1)
        whole = tensor if one.decided and one.decided.whole_experts else 1
        assert one.decided is not None
        assert one.decided.expert is not None
        within, rest = divmod(one.decided.expert, whole)
        assert not rest
        assert within == 1 or within % context == 0
        assert shards % within == 0
    assert {one.decided.whole_experts for one in cut if one.decided} >= {False, True}
    assert any("ring" in one.roles for one in cut)
    assert any("replica" in one.roles for one in cut)


def test_plans_of_engines_overlap_nothing_that_no_engine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are other orders of turns tried for strategies that get their order by hand."""
    asked = list[SearchRequest]()

    class Asked(Exception):  # noqa: N818  # a way out, and no error
        pass

    def searched(request: SearchRequest) -> None:
        asked.append(request)
        raise Asked

    monkeypatch.setattr(fixed_schedule, "search", searched)
    configuration = configurations("torch")[0]
    with pytest.raises(Asked):
        plan_within(SPACES["torch"], request_for("torch"), configuration, (4,), (0,))
    (pinned,) = (request.pinned for request in asked)
    assert (pinned.tensor_overlap, pinned.expert_overlap, pinned.interleave, pinned.slices) == (1, False, 1, 1)
    assert (pinned.schedule, pinned.virtual_stages) == ("1f1b", 1)


SELECTIVE = [engine for engine, space in SPACES.items() if any(settings.selective for settings in space.settings)]


@pytest.mark.cases(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize("engine", SELECTIVE)
def test_selective_recomputation_is_written_and_read_back(engine: str) -> None:
    found = [one for one in configurations(engine) if one.decided and one.decided.kept]
    configuration = found[len(found) // 2]
    count = configuration.pipeline * configuration.virtual_stages
    check_written_and_read(engine, configuration, [4 // count] * count, (4 // count,) * count)


@pytest.mark.slow
def test_what_selective_blocks_keep_is_priced_as_the_plan_of_the_engine_has_it() -> None:
    """One configuration of torchtitan leaves the search no choice, so that its bound is what the plan comes to, where
    hosts launch in no time."""
    asked = request_for("torchtitan")
    cluster = of_one_kind(asked.cluster, "an engine")
    quick = replace(cluster, device=replace(cluster.device, host_latency=0.0))
    asked = replace(asked, cluster=quick)
    degrees = Pinned(pipeline=1, data=8, tensor=1, context=1, zero=3, micro_batches=2, recompute="selective")
    found = best_plans(replace(asked, pinned=degrees))
    assert found.bound_seconds == pytest.approx(found.plans[0].objective, rel=0.01)
    assert describe(found.bound).kept == TORCHTITAN.settings[0].selective[0][1]
    assert found.bound_seconds <= found.plans[0].objective * (1 + 1e-9)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_the_best_is_that_of_all_numbers_of_copies(zero: int) -> None:
    """Each number of copies alone is the oracle."""
    asked, hosts = request_for("torchtitan"), load_profile("h100-80gb").with_devices(16)
    pinned = Pinned(pipeline=1, tensor=1, context=1, zero=zero, micro_batches=1)
    request = replace(asked, cluster=hosts.with_software(load_software("fsdp")), pinned=pinned)
    found = best_plans(request)
    alone = [best_plans(replace(request, pinned=replace(pinned, replicas=count))).plan for count in (1, 2, 4, 8)]
    assert len({one.prediction.step_seconds for one in alone}) == len(alone)
    assert found.plan.prediction.step_seconds == min(one.prediction.step_seconds for one in alone)
    assert found.bound_seconds <= found.plans[0].objective * (1 + 1e-9)


def check_written_and_read(
    engine: str, configuration: Configuration, stages: list[int], full: tuple[int, ...], model: str = MODEL
) -> None:
    """A plan of a configuration is told to the engine without a loss, and read back as it was."""
    request, space, target = request_for(engine, model), SPACES[engine], TARGETS[engine]
    found = plan_within(space, request, configuration, tuple(stages), full)
    description = describe(found)
    assert target.nearest(description) == ()
    architecture = architecture_of(model, request.model.sequence_length)
    job = Job(
        model=model,
        description=description,
        architecture=architecture,
        per_node=8,
        overlapped=("tensor", "gathers", "reductions"),
    )
    files = target.write(job)
    beside = files.get(target.beside or "", "")
    facts = Facts(layers=4, devices=DEVICES, architecture=architecture, beside=beside)
    reading = target.read(files[target.main], facts)
    assert reading.description == description
    assert not [note for note in reading.notes if note.startswith("not read")]
    subject = Subject(model=request.model, graph=request.graph, batch=request.batch, cluster=request.cluster)
    again = plan_of(subject, reading.description)
    assert differences(found, again) == ()
    assert again.plan.prediction == found.plan.prediction


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_best_plan_of_a_space_fits_where_memory_is_short() -> None:
    request = request_for("megatron")
    room = best_plans(request)

    limit = room.plan.prediction.peak_bytes * 0.999
    found = best_plans(replace(request, memory_limit=limit))
    assert found.plan.prediction.peak_bytes <= limit
    assert found.bound_seconds <= found.plans[0].objective * (1 + 1e-9)
    assert found.plans[0].objective >= room.bound_seconds


def test_what_is_proved_with_less_memory_than_there_is_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plan holds more as the engine runs it than the search counts, so that another search has less."""
    request, found, run = request_for("accelerate"), list[SearchResult](), _as_run
    pinned = Pinned(pipeline=1, data=DEVICES, micro_batches=1)

    def searched(*given: Any) -> SearchResult:
        result = search(*given)
        found.append(replace(result, bound_seconds=2 * result.bound_seconds, bounds={}) if found else result)
        return found[-1]

    def as_run(space: EngineSpace, request: SearchRequest, ranked: Ranked) -> Ranked:
        made = run(space, request, ranked)
        peak = 1.001 * found[0].limits[0] if len(found) == 1 else made.plan.prediction.peak_bytes
        plan = replace(made.plan, prediction=replace(made.plan.prediction, peak_bytes=peak))
        return replace(made, bound=replace(made.bound, plan=plan))

    monkeypatch.setattr("planner.strategy_search.within.search", searched)
    monkeypatch.setattr("planner.strategy_search.within._as_run", as_run)
    result = best_plans(replace(request, pinned=pinned))
    first, last = found
    assert last.limits < first.limits == result.limits
    assert (result.bound_seconds, result.bounds) == (first.bound_seconds, first.bounds)
    assert result.plan.provenance.gap == pytest.approx(result.gap, rel=1e-2, abs=1e-9)


@pytest.mark.slow
def test_every_stage_of_zero_is_priced_with_its_own_gradients() -> None:
    """Three devices divide few dims, so weights stay whole and gradients are reduced with every micro-batch."""
    asked, cluster = request_for("megatron"), load_profile("h100-80gb").with_devices(3)
    pinned = Pinned(pipeline=1, data=3, tensor=1, context=1, zero=1)
    request = replace(asked, cluster=cluster.with_software(load_software("megatron")), global_batch=3, pinned=pinned)
    found = best_plans(request)
    assert found.bound_seconds <= found.plans[0].objective * (1 + 1e-9)


@pytest.mark.slow
def test_a_model_without_blocks_has_a_plan_for_an_engine() -> None:
    asked = request_for("megatron")
    built = build_model("llama-tiny+num_layers=1", dtype="bfloat16")
    graph = trace(built.module, built.args, built.kwargs)
    reference = model_reference(graph, name=MODEL, sequence_length=built.sequence_length, batch=built.batch)
    pinned = Pinned(pipeline=1, tensor=2, micro_batches=1)
    found = best_plans(replace(asked, graph=graph, model=reference, pinned=pinned))
    assert found.plan.prediction.step_seconds > 0


def test_decisions_that_an_engine_is_not_told_of_are_refused() -> None:
    request = request_for("torchtitan")
    with refused(Exception, "--for torchtitan"):
        within(SPACES["torchtitan"], replace(request, pinned=replace(request.pinned, zero=1, pipeline=1)))


def test_degrees_that_models_of_an_engine_lack_are_left_out() -> None:
    asked = request_for("torchtitan", "mixtral-tiny")
    known = replace(asked, model=replace(asked.model, reference="qwen3-30b-a3b"))
    found = within(SPACES["torchtitan"], known)
    assert {one.pipeline for one in found.alternatives} == {1}
    with refused(RequestError, "--for torchtitan", "pipeline = 2", "qwen3-30b-a3b"):
        within(SPACES["torchtitan"], replace(known, pinned=Pinned(pipeline=2)))


def test_an_engine_that_is_told_all_dimensions_is_searched_for_known_ones_alone() -> None:
    latent = replace(request_for("nemo").model, reference="deepseek-v3")
    grouped = replace(latent, reference="deepseek-tiny")
    check_told("nemo", request_for("nemo").model)
    check_told("nemo", latent)
    check_told("megatron", grouped)
    check_told("torch", latent)
    check_told("torch", grouped)
    foretelling = replace(latent, reference="deepseek-v3+predicted_tokens=1")
    check_told("nemo", foretelling)
    for engine, reference in (("torch", foretelling), ("nemo", grouped)):
        with refused(RequestError, f"--for {engine}", reference.reference, "--for megatron"):
            check_told(engine, reference)
