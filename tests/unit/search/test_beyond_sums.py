"""What the sums of the search do not know, and what is not looked at, is not claimed."""

import itertools
from dataclasses import replace

import pytest

import planner
from planner.errors import InfeasibleError
from planner.plan.layout.per_step_communication import reduction_starts
from planner.sharding.buckets import trainable_positions
from planner.sharding.update import PLAIN, Buckets, Update
from planner.strategy_search.engine.contenders import Contender
from planner.strategy_search.finalists.finalists import Finalists
from planner.strategy_search.finalists.proofs import Ranked
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.search import find_fitting, search
from tests.unit.search.cases import cluster_of, launched_at_once, request_of


def test_the_search_goes_on_past_the_sum_of_its_incumbent() -> None:
    """Data parallel has the least sum here, but its buckets are sent for longer than sums know."""
    pinned = Pinned(context=1, sequence_parallel=False)
    cluster = cluster_of("ascend-910b-64gb", 8)
    request = request_of("single-2", cluster, 8, precision="bf16", optimizer="sgd", pinned=pinned)
    (every, *_), (found, *_) = search(replace(request, prune=False)).plans, search(request).plans
    assert found.seconds <= every.seconds * (1 + 1e-9)


def test_configurations_that_are_not_taken_become_no_plans() -> None:
    request = request_of("llama-4", cluster_of("h100-80gb", 2), 8, pinned=Pinned(micro_batches=4), update=PLAIN)
    (best, *_) = search(request).plans
    ranks = best.configuration.pipeline
    asked = search(request, takes=lambda configuration: configuration.pipeline != ranks)
    assert all(one.configuration.pipeline != ranks for one in (*asked.plans, *asked.priced))
    assert best.seconds < asked.plans[0].seconds
    with pytest.raises(InfeasibleError):
        search(request, takes=lambda _: False)


@pytest.mark.thorough
@pytest.mark.slow
def test_the_bound_of_a_search_that_is_stopped_counts_virtual_stages_that_are_left() -> None:
    request = request_of("llama-4", cluster_of("ascend-910b-64gb", 4), 8, pinned=Pinned(pipeline=2, micro_batches=4))
    whole = search(request)
    best = min(ranked.objective for ranked in whole.plans)
    bounds = []
    for looks in range(2, 40, 2):
        times = itertools.count(1)
        try:
            result = search(request, cancelled=lambda: next(times) > looks)  # noqa: B023
        except InfeasibleError:
            continue
        bounds.append(result.bound_seconds)
        if not result.statistics.stopped:
            break
    assert len(bounds) > 1
    assert max(bounds) <= best * (1 + 1e-9)


def test_interleaved_stages_are_searched_where_the_schedule_alone_is_asked_for() -> None:
    pinned = Pinned(pipeline=2, schedule="interleaved_1f1b")
    request = request_of("residual-8", cluster_of("h100-80gb", 4), 8, pinned=pinned)
    for asked in (request, replace(request, prune=False)):
        assert search(asked).plans[0].configuration.virtual_stages > 1


def test_gathering_by_block_fits_where_each_weight_beside_its_operator_does_not() -> None:
    """A weight that is gathered by itself lies beside what its operator needs for a moment."""
    pinned = Pinned(pipeline=1, data=4, tensor=2, zero=1, recompute="none", micro_batches=1)

    def asked(gathers: str) -> SearchRequest:
        update = Update(gathers=gathers, gradient_dtype="fp32")
        limit = 537043159.04
        return request_of(
            "post-norm", cluster_of("cpu", 8), 8, precision="fp32", pinned=pinned, update=update, memory_limit=limit
        )

    assert find_fitting(asked("block"))
    assert find_fitting(asked("auto"))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("buckets", [(5, 12), (("*norm*", 0), ("*mlp*", 1), ("*", 2))])
def test_gradients_go_in_the_buckets_that_were_asked_for(buckets: Buckets, micro_batches: int) -> None:
    """Reduced one by one in the only micro-batch, they would need no bucket."""
    pinned = Pinned(pipeline=1, data=4, context=1, tensor=1, zero=0, micro_batches=micro_batches)
    request = request_of("llama-4", cluster_of("cpu", 4), 8, pinned=pinned, update=Update(buckets=buckets))
    bound = search(request).bound
    reduced = reduction_starts(bound, bound.parameters).buckets
    assert len(reduced) == 3
    assert sum(len(one.members) for one in reduced) == len(trainable_positions(bound.graph))


def test_a_search_with_a_cutoff_searches_on_up_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the plans of the least sums take longer than the cutoff, others that take less are looked for still."""
    pinned = Pinned(pipeline=1, tensor_overlap=1, interleave=1, slices=1)
    request = request_of("chain", launched_at_once(cluster_of("h100-80gb", 4)), 8, pinned=pinned)
    least = search(request).plans[0].objective
    priced = Finalists._priced_once

    def stretched(self: Finalists, found: Contender, cutoff: float) -> Ranked:
        """Thrice the step of whatever is close to the least sum."""
        ranked = priced(self, found, cutoff)
        if found.objective > least * 1.05 or ranked.seconds == 3 * least:
            return ranked
        plan = ranked.plan
        slower = replace(plan.prediction, step_seconds=3 * least)
        found_slow = replace(ranked, bound=replace(ranked.bound, plan=replace(plan, prediction=slower)))
        self._before[id(found_slow)] = found_slow
        self._known[id(found)] = (found, found_slow)
        return found_slow

    monkeypatch.setattr(Finalists, "_priced_once", stretched)
    free = search(request).plans[0].seconds
    assert free < 2.5 * least
    assert search(request, cutoff=2.5 * least).plans[0].seconds == free


@pytest.mark.slow
@pytest.mark.thorough
def test_more_stages_on_each_rank_are_evaluated_where_their_transfers_run_under_work() -> None:
    """Sums count all of these, and are cut off by the plan without a pipeline."""
    found = planner.search("mixtral-8x7b", "h100-80gb", devices=64, simplicity=0.0).plan
    pinned = planner.search(
        "mixtral-8x7b", "h100-80gb", devices=64, simplicity=0.0, pinned={"pipeline": 2, "virtual_stages": 8}
    ).plan
    assert found.prediction.step_seconds <= pinned.prediction.step_seconds * (1 + 1e-6)
