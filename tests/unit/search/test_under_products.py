"""What collectives save under products, in the tables of the search: not less than in a plan, and hardly more."""

import itertools
from dataclasses import replace

import pytest

from planner.plan.prediction.predict import predict
from planner.strategy_search.engine.families import all_configurations, engine_of
from planner.strategy_search.finalists.finalists import Finalists
from planner.strategy_search.finalists.plan_maker import PlanMaker
from planner.strategy_search.request.space import Pinned, Running
from planner.strategy_search.search import search
from tests.long_lists import first
from tests.unit.search.cases import cluster_of, request_of

WIDE = "llama70b-4-layers"
CASES = tuple(itertools.product((8, 4, 2), ("selective", "none", "full"), (1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "recompute", "micro_batches"), first(2, CASES), ids=str)
def test_no_step_is_shorter_than_its_bound_and_few_are_much_longer(
    tensor: int, recompute: str, micro_batches: int
) -> None:
    pinned = Pinned(
        pipeline=1, context=1, tensor=tensor, recompute=recompute, micro_batches=micro_batches, interleave=1
    )
    request = request_of(WIDE, cluster_of("h100-80gb", 8), 8, pinned=pinned, precision="bf16", top=3)
    result = search(request)
    for ranked in result.plans:
        assert ranked.seconds >= result.bound_seconds * (1 - 1e-9)
    assert (
        result.plans[0].seconds <= result.bound_seconds * 1.08
    )  # which knows the least that messages of few layers take


def test_layouts_are_chosen_for_what_they_take_under_products() -> None:
    """Rows that come by all-gather and go by reduce-scatter hide under products in chunks."""
    pinned = Pinned(pipeline=1, context=1, tensor=8, micro_batches=1, interleave=1)
    result = search(request_of(WIDE, cluster_of("h100-80gb", 8), 8, pinned=pinned, precision="bf16"))
    time = dict(result.plan.prediction.time)
    assert -time["tensor parallelism under computation"] > 0.4 * time["communication"]


@pytest.mark.slow
def test_of_products_of_one_operand_some_may_be_of_other_layouts() -> None:
    """Four experts are no multiple of eight devices, so that the router does not read what the shared expert does."""
    pinned = Pinned(pipeline=1, context=1, tensor=8, micro_batches=1, interleave=1, sequence_parallel=True)
    request = request_of("few-experts", cluster_of("h100-80gb", 8), 8, pinned=pinned, precision="bf16")
    result = search(request)
    assert 0 < result.gap < 0.01
    assert result.plans[0].seconds >= result.bound_seconds * (1 - 1e-9)


@pytest.mark.parametrize("never", ["matmul", "attention"])
def test_an_operand_that_comes_again_saves_what_it_saved_at_first_unless_all_of_its_products_are_kept(
    never: str,
) -> None:
    """Where they are kept, the gradients of its rows alone are there to cover it, whole: that saves more."""
    pinned = Pinned(
        pipeline=1,
        context=1,
        tensor=8,
        sequence_parallel=True,
        recompute="selective",
        never_kept=(never,),
        micro_batches=2,
        interleave=1,
    )
    result = search(request_of(WIDE, cluster_of("h100-80gb", 8), 8, pinned=pinned, precision="bf16"))
    assert result.plans[0].seconds * (1 - 1e-9) >= result.bound_seconds
    assert result.gap < (0.001 if never == "matmul" else 0.01)


@pytest.mark.cases(1)
@pytest.mark.parametrize("schedule", ["zb_h1", "1f1b"])
def test_an_order_with_weight_gradients_apart_has_nothing_under_products(schedule: str) -> None:
    """So that it need not be tried where that would cost more than its bubble: no order takes less than is said, which
    is more than what its ranks work in 1F1B."""
    pinned = Pinned(pipeline=2, tensor=4, micro_batches=8, virtual_stages=1, schedule="1f1b")
    cluster = cluster_of("h100-80gb", 8)
    request = request_of(WIDE, cluster, 8, pinned=pinned, precision="bf16")
    (ranked, *_), (engine, _) = search(request).plans, engine_of(request)
    configuration = next(c for c in all_configurations(engine) if c == ranked.configuration)
    found = engine.contender(configuration, engine.evaluate(configuration))
    least = found.least_step(any_order=True)
    assert ranked.plan.training.tensor_overlap
    assert least > (ranked.seconds - ranked.bubble) * 1.01
    overlap = ranked.plan.training.tensor_overlap if schedule == "1f1b" else ()
    training = replace(ranked.plan.training, tensor_overlap=overlap)
    other = replace(ranked.bound, plan=replace(ranked.plan, schedule=schedule, training=training))
    assert predict(other, cluster).step_seconds >= least


@pytest.mark.cases(1)
@pytest.mark.parametrize("recompute", ["selective", "none"])
def test_no_rank_loses_less_without_overlap_than_is_said(recompute: Running) -> None:
    """Results that recomputed blocks keep travel under no product."""
    pinned = Pinned(
        pipeline=2, tensor=4, micro_batches=8, virtual_stages=1, schedule="1f1b", recompute=recompute,
        sequence_parallel=False,
    )  # fmt: skip
    cluster = cluster_of("h100-80gb", 8)
    request = request_of(WIDE, cluster, 8, pinned=pinned, precision="bf16")
    (ranked, *_), (engine, _) = search(request).plans, engine_of(request)
    configuration = next(c for c in all_configurations(engine) if c == ranked.configuration)
    found = engine.contender(configuration, engine.evaluate(configuration))
    alone = replace(ranked.plan, training=replace(ranked.plan.training, tensor_overlap=()))
    without, stages = predict(replace(ranked.bound, plan=alone), cluster).stages, ranked.plan.prediction.stages
    lost = [one.micro_batch_seconds - other.micro_batch_seconds for one, other in zip(without, stages, strict=True)]
    assert 0 < found.beneath <= 8 * min(lost) * (1 + 1e-9)


@pytest.mark.thorough
@pytest.mark.slow
def test_room_is_left_for_overlaps_where_that_is_faster() -> None:
    """Not where the plan with the overlaps that fit without it takes less."""
    pinned = Pinned(pipeline=1, mesh=(16, 4), micro_batches=16)
    request = request_of(
        "llama70b-16-layers", cluster_of("h100-80gb", 64), 256, pinned=pinned, precision="bf16", memory_limit=20 * 2**30
    )
    result, (engine, prepared) = search(request), engine_of(request)
    (configuration,) = (c for c in all_configurations(engine) if c == result.plans[0].configuration)
    found = engine.contender(configuration, engine.evaluate(configuration))
    maker = PlanMaker(
        request=request, engine=engine, prepared=prepared, bound=0.0, limits=result.limits, covered=True
    )  # fmt: skip
    as_found = Finalists(maker=maker, found=[found]).plain(found)
    assert as_found is not None
    assert result.plans[0].seconds <= as_found.seconds
