"""Overlaps of tensor parallelism are chosen where they pay, never make a step longer, and leave the bound as it is."""

import math
from dataclasses import replace

import pytest

from hardware_profiles import MixedCluster, load_software
from planner.errors import PlanFileError, RequestError
from planner.plan.binding.bind import bind
from planner.plan.file import dump_plan, parse_plan
from planner.plan.layout.overlapped_products import overlaps_of
from planner.plan.prediction.predict import predict, stage_costs
from planner.plan.prediction.step import UNDER_PRODUCTS
from planner.strategy_search.engine.product_overlap import (
    best_overlaps,
    with_everything,
    with_fewer,
    with_tensor_overlap,
)
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.result import SearchResult
from planner.strategy_search.search import search
from planner.strategy_search.tables.products import CHUNKS
from tests.refusals import refused
from tests.unit.search.cases import BATCH, cluster_of, request_of, traced

WIDE = "llama70b-4-layers"
SPLIT = {"tensor": 8, "sequence_parallel": True, "micro_batches": 8}


def result_of(model: str = WIDE, profile: str = "h100-80gb", devices: int = 8, **pinned: object) -> SearchResult:
    chosen = Pinned(**{**SPLIT, **pinned})  # type: ignore[arg-type]
    precision = "bf16" if model == WIDE else "fp32"
    return search(request_of(model, cluster_of(profile, devices), 8, pinned=chosen, precision=precision))


def test_overlaps_are_taken_where_they_pay_and_no_step_is_below_the_bound() -> None:
    """Here micro-batches do not take turns."""
    free, waits = result_of(interleave=1), result_of(interleave=1, tensor_overlap=1)
    assert waits.plan.training.tensor_overlap == ()
    assert free.plan.training.tensor_overlap
    assert free.plan.prediction.step_seconds < waits.plan.prediction.step_seconds
    assert free.bound_seconds <= free.plan.prediction.step_seconds * (1 + 1e-12)
    assert free.bound_seconds <= waits.bound_seconds <= waits.plan.prediction.step_seconds * (1 + 1e-12)
    assert free.gap == pytest.approx(1 - free.bound_seconds / free.plan.prediction.step_seconds, rel=0.01)


def test_times_sum_to_the_step_and_no_more_is_saved_than_is_sent() -> None:
    plan = result_of(interleave=1).plan
    time = dict(plan.prediction.time)
    assert sum(time.values()) == pytest.approx(plan.prediction.step_seconds)
    assert 0 < -time[UNDER_PRODUCTS] < time["communication"]


def test_each_has_the_chunks_that_save_most() -> None:
    """None of the other choices for a collective makes the step shorter."""
    bound, cluster = result_of(interleave=1).bound, cluster_of("h100-80gb", 8)
    overlaps = bound.plan.training.tensor_overlap
    at, (name, there, back, first) = next(one for one in enumerate(overlaps) if one[1][0].endswith("/shared"))
    others = {(number, back, few) for number in CHUNKS for few in (0, 1)}
    others |= {(there, number, first) for number in CHUNKS}
    for chunks in sorted(others):
        chosen = (*overlaps[:at], (name, *chunks), *overlaps[at + 1 :])
        training = replace(bound.plan.training, tensor_overlap=chosen)
        changed = replace(bound, plan=replace(bound.plan, training=training))
        assert predict(changed, cluster).step_seconds >= bound.plan.prediction.step_seconds * (1 - 1e-9)
    assert best_overlaps(bound, cluster) == bound.plan.training.tensor_overlap


def test_of_overlaps_that_do_not_all_fit_some_are_taken() -> None:
    """All but that of the head: there is most at once."""
    waits, cluster, pinned = result_of(interleave=1, tensor_overlap=1).bound, cluster_of("h100-80gb", 8), Pinned()
    everything, missing, _ = with_tensor_overlap(waits, pinned, cluster, [math.inf])
    most, least = (one.plan.prediction.peak_bytes for one in (everything, waits))
    assert missing == 0
    assert most > least
    limit = most * (1 - 1e-6)
    some, missing, _ = with_tensor_overlap(waits, pinned, cluster, [limit])
    assert missing == 0 or missing == pytest.approx(most - limit)
    assert some.plan.prediction.peak_bytes <= limit
    seconds = [one.plan.prediction.step_seconds for one in (everything, some, waits)]
    assert seconds == sorted(set(seconds))
    left = {name for name, *_ in everything.plan.training.tensor_overlap if name != "lm_head/linear"}
    assert {name for name, *_ in some.plan.training.tensor_overlap} == left


def test_fewer_overlaps_lack_less_memory_and_save_less() -> None:
    """Those that room is left for where there is none for all of them."""
    waits, cluster, pinned = result_of(interleave=1, tensor_overlap=1).bound, cluster_of("h100-80gb", 8), Pinned()
    limits = [0.99 * waits.plan.prediction.peak_bytes]
    everything = with_everything(waits, pinned, cluster, limits)
    *some, most = [*with_fewer(everything.bound, cluster, limits), everything]
    assert len(some) > 1
    numbers = [len(one.bound.plan.training.tensor_overlap) for one in (*some, most)]
    assert numbers == sorted(set(numbers))
    assert [one.missing for one in (*some, most)] == sorted(one.missing for one in (*some, most))
    assert some[0].missing < most.missing
    assert most.seconds < some[0].seconds < waits.plan.prediction.step_seconds
    told = [(one.missing, one.seconds) for one in some]
    for at, (missing, seconds) in enumerate(told):
        found = with_fewer(everything.bound, cluster, limits, below=seconds)
        assert [(one.missing, one.seconds) for one in found] == told[at + 1 :]
        found = with_fewer(everything.bound, cluster, [limits[0] + missing])
        assert [one.seconds for one in found] == [one[1] for one in told if one[0] > missing]


def test_as_many_chunks_as_are_asked_for() -> None:
    plan = result_of(interleave=1, tensor_overlap=4).plan
    assert {chunks for _, *both, _ in plan.training.tensor_overlap for chunks in both} == {4}
    with refused(RequestError, 63, "chunks divide", "--tensor-overlap auto"):
        result_of(interleave=1, tensor_overlap=63)


@pytest.mark.parametrize("clash", [{"interleave": 2}, {"pipeline": 2, "tensor": 4, "schedule": "zb_h1"}], ids=str)
def test_what_takes_operators_apart_is_refused(clash: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="tensor_overlap"):
        result_of(**{"tensor_overlap": 2, **clash})


def test_nothing_overlaps_on_processors_unless_asked() -> None:
    small = {"model": "llama-4", "profile": "cpu", "devices": 2, "tensor": 2, "interleave": 1, "micro_batches": 1}
    assert result_of(**small).plan.training.tensor_overlap == ()  # type: ignore[arg-type]
    assert result_of(**small, tensor_overlap=2).plan.training.tensor_overlap  # type: ignore[arg-type]


def test_a_plan_comes_back_from_its_file() -> None:
    plan = result_of(interleave=1, tensor_overlap=2).plan
    assert parse_plan(dump_plan(plan)) == plan


def test_what_a_plan_names_must_be_there() -> None:
    plan = result_of(interleave=1, tensor_overlap=2).plan
    (name, *_), *_ = plan.training.tensor_overlap
    for wrong in (("model.norm/rms_norm", 2, 2, 0), (name, 63, 2, 0), (name, 2, 2, 9)):
        changed = replace(plan, training=replace(plan.training, tensor_overlap=(wrong,)))
        with pytest.raises(PlanFileError, match=r"training\.tensor_overlap"):
            overlaps_of(bind(changed, traced(WIDE), BATCH))


def test_messages_are_those_of_chunks() -> None:
    """As many times as many, each as much smaller, and no byte more or less."""
    cluster = cluster_of("h100-80gb", 8)
    sent = []
    for chunks in (1, 4):
        plan = result_of(interleave=1, tensor_overlap=chunks).plan
        (cost,) = stage_costs(bind(plan, traced(WIDE), BATCH), cluster)
        gathers = [
            (one.message.nbytes, times) for one, times in cost.messages.items() if one.message.kind == "all_gather"
        ]
        sent.append((sum(times for _, times in gathers), sum(nbytes * times for nbytes, times in gathers)))
    assert sent[0][1] == sent[1][1]
    assert sent[1][0] > 2 * sent[0][0]


@pytest.mark.slow
@pytest.mark.thorough
def test_of_several_plans_the_fastest_comes_first() -> None:
    request = request_of(WIDE, cluster_of("h100-80gb", 8), 8, pinned=Pinned(tensor=8), top=3)
    seconds = [ranked.seconds for ranked in search(request).plans]
    assert seconds == sorted(seconds)
    assert len(seconds) == 3
    with refused(RequestError, "no collective of tensor parallelism"):
        search(replace(request, pinned=Pinned(tensor=1, tensor_overlap=2)))


@pytest.mark.slow
@pytest.mark.thorough
def test_the_free_search_is_as_good_as_that_for_a_degree() -> None:
    """Of configurations whose sums are close the one is taken that is the fastest with its overlaps."""
    request = request_of(WIDE, cluster_of("h100-80gb", 16), 8, precision="bf16")
    free = search(request)
    assert free.plan.training.tensor_overlap
    for tensor in (2, 4):
        pinned = search(replace(request, pinned=Pinned(tensor=tensor))).plans[0].seconds
        assert free.plans[0].seconds <= pinned * (1 + 1e-4)  # buckets that save less are not looked for


def test_other_software_and_devices_of_several_kinds_hide_by_themselves() -> None:
    cluster, other = cluster_of("h100-80gb", 4), cluster_of("a100-80gb", 4)
    for chunks in (0, 4):
        for machine in (
            cluster.with_software(load_software("nemo")),
            MixedCluster(groups=(cluster, other), bandwidth=1e9),
        ):
            request = request_of("llama-4", machine, 8, pinned=Pinned(tensor=2, tensor_overlap=chunks))
            with refused(RequestError, f"tensor_overlap = {chunks or 'auto'}", "leave it out"):
                search(request)
