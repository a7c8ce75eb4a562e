"""What people write by hand is in the space, so the search is never slower than Megatron, data parallelism or FSDP."""

import math
from collections.abc import Sequence

import pytest

from planner.plan.binding.bind import BoundPlan, bind
from planner.plan.plan import Prediction
from planner.plan.prediction.memory.moving import most_moving, receive_buffers
from planner.plan.prediction.predict import predict
from planner.strategy_search.engine.contenders import NEAR
from planner.strategy_search.engine.outcome import RankFilling
from planner.strategy_search.request.space import Configuration, Pinned
from planner.strategy_search.search import search
from tests.unit.search.by_hand import ALL_CUT, COPIES, GRADIENT_CUT, UPDATE_CUT, Option, by_hand
from tests.unit.search.cases import (
    BATCH,
    Case,
    columns_of,
    make_case,
    plan_of,
    rank_peak_of,
    request_of,
    seconds_of,
    traced,
)

MEGATRON = ("data", "tensor")
BY_HAND: tuple[tuple[str, int, int, tuple[int, ...], tuple[str, ...], Option, bool], ...] = (
    ("llama8b", 32, 1, (8,), ("tensor",), COPIES, True),
    ("llama8b", 32, 1, (2, 4), MEGATRON, UPDATE_CUT, True),
    ("llama8b", 32, 2, (4,), ("tensor",), COPIES, True),
    ("llama8b", 32, 4, (2,), ("data",), GRADIENT_CUT, True),
    ("llama8b", 32, 1, (8,), ("data",), COPIES, False),
    ("llama8b", 32, 1, (8,), ("data",), UPDATE_CUT, True),
    ("llama8b", 32, 1, (8,), ("data",), ALL_CUT, True),
    ("llama70b-4-layers", 128, 1, (8, 8), MEGATRON, COPIES, True),
    ("llama70b-4-layers", 128, 2, (4, 8), MEGATRON, UPDATE_CUT, True),
    ("llama70b-4-layers", 128, 1, (8, 8), ("data", "data"), UPDATE_CUT, True),
    ("llama70b-4-layers", 128, 1, (64,), ("data",), COPIES, False),
    ("llama70b-4-layers", 128, 1, (64,), ("data",), ALL_CUT, True),
)


def case_of(model: str, batch: int, pipeline: int, mesh: tuple[int, ...]) -> Case:
    """With one sample on each device in a micro-batch."""
    configuration = Configuration(pipeline=pipeline, mesh=mesh, micro_batches=batch // math.prod(mesh))
    return make_case(model, "h100-80gb", configuration, batch, "bf16")


def judged(case: Case, axes: tuple[str, ...], on_data: Option, recompute: bool) -> Prediction:
    """What the prediction says of a plan by hand, which is what the pieces say, and of memory what they leave out."""
    ranks = by_hand(case, axes, on_data, recompute=recompute)
    bound, device = bind(plan_of(case, ranks), traced(case.model), BATCH), case.cluster.device
    prediction = predict(bound, case.cluster)
    state = (next(c for c in ranks[0].inner).candidates[case.chain.boundary[0]],)
    assert math.isclose(prediction.objective_seconds, seconds_of(case, state, ranks), rel_tol=1e-9)
    beyond = beside_pieces(case, bound, ranks)
    counted = [rank_peak_of(case, state, ranks, rank) for rank in range(len(ranks))]
    fullest = max(map(sum, zip(counted, beyond, strict=True)))
    assert math.isclose(prediction.peak_bytes, fullest * (1 + device.allocator_slack) + device.reserved, rel_tol=1e-9)
    return prediction


def beside_pieces(case: Case, bound: BoundPlan, ranks: Sequence[RankFilling]) -> list[float]:
    """Bytes of each rank that the prediction alone counts: what stages receive ahead, and redistributions on their way
    that take more than any operator does for a moment."""
    transient = [
        max(column.amounts.transient for column in columns_of(case, ranks, rank)) for rank in range(len(ranks))
    ]
    moving = [max(0.0, most - usual) for most, usual in zip(most_moving(bound), transient, strict=True)]
    received = receive_buffers(bound)
    assert all(received) is (len(ranks) > 1)
    return [one + other for one, other in zip(moving, received, strict=True)]


@pytest.mark.cases(0, 2)
@pytest.mark.slow
@pytest.mark.parametrize(("model", "batch", "pipeline", "mesh", "axes", "on_data", "fits"), BY_HAND)
def test_never_slower_than_by_hand(
    model: str, batch: int, pipeline: int, mesh: tuple[int, ...], axes: tuple[str, ...], on_data: Option, fits: bool
) -> None:
    """On the same mesh with as many micro-batches, blocks recomputed or not, and in the words of the command line. Of
    plans of one configuration the objective decides."""
    case = case_of(model, batch, pipeline, mesh)
    people = [judged(case, axes, on_data, recompute) for recompute in (False, True)]
    assert (people[1].peak_bytes <= people[1].capacity_bytes) is fits
    pinned = Pinned(pipeline=pipeline, mesh=mesh, micro_batches=case.configuration.micro_batches)
    found = search(request_of(model, case.cluster, batch, precision="bf16", pinned=pinned))
    for plan in people:
        if plan.peak_bytes <= plan.capacity_bytes:
            assert found.plan.prediction.objective_seconds <= plan.objective_seconds * (1 + 1e-9)
            assert found.bound_seconds <= plan.objective_seconds * (1 + 1e-9)


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "pinned",
    [
        Pinned(data=8, tensor=1, context=1, pipeline=1, zero=2),
        Pinned(tensor=4, sequence_parallel=True),
        Pinned(tensor=2, pipeline=2),
        Pinned(pipeline=4, recompute="full"),
    ],
)
def test_a_free_search_is_never_slower_than_a_pinned_one(pinned: Pinned) -> None:
    cluster = case_of("llama8b", 32, 1, (8,)).cluster
    request = request_of("llama8b", cluster, 32, precision="bf16")
    free = search(request).plan.prediction
    decided = search(request_of("llama8b", cluster, 32, precision="bf16", pinned=pinned)).plan.prediction
    assert free.objective_seconds <= decided.objective_seconds * (1 + NEAR)
    assert free.step_seconds <= decided.step_seconds * (1 + 1e-9)
