"""The search and the schedules: pinned, compared, and within the memory there is."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

import planner
from costmodels import ChunkSeconds, PassSeconds, RankSeconds, schedule_orders, simulate
from hardware_profiles import Machine
from planner.errors import InfeasibleError, RequestError
from planner.plan.binding.bind import BoundPlan, bind_prepared
from planner.plan.plan import Plan, Prediction
from planner.plan.prediction.predict import predict
from planner.plan.prediction.step import PIPELINE_BUBBLE
from planner.sharding.update import PLAIN, Update
from planner.strategy_search.engine import scheduling
from planner.strategy_search.engine.contenders import NEAR, Contender, apart_seconds, in_1f1b
from planner.strategy_search.engine.families import Shared
from planner.strategy_search.engine.scheduling import IN_A_V, WORTH
from planner.strategy_search.exploration.attempt import Attempt
from planner.strategy_search.exploration.options import SearchOptions
from planner.strategy_search.exploration.other_schedules import OtherSchedules
from planner.strategy_search.finalists import room
from planner.strategy_search.finalists.finalists import Finalists, OverfullError, _in_order
from planner.strategy_search.finalists.plan_maker import PlanMaker
from planner.strategy_search.finalists.proofs import Ranked
from planner.strategy_search.finalists.v_stages import v_counts
from planner.strategy_search.request.space import Configuration, Pinned
from planner.strategy_search.result import SearchResult
from planner.strategy_search.search import least_in_a_v, search
from tests.refusals import refused
from tests.unit.search.cases import cluster_of, launched_at_once, request_of, with_quick_host

DEEP = {"pipeline": 4, "micro_batches": 4}


def result_of(model: str, memory_limit: float | None = None, **pinned: object) -> SearchResult:
    """Each weight is gathered by itself, in whatever order ranks take their turns."""
    own, cluster = Pinned(**pinned), cluster_of("h100-80gb", 4)  # type: ignore[arg-type]
    return search(request_of(model, cluster, 8, pinned=own, memory_limit=memory_limit, update=PLAIN))


def test_zero_bubble_is_taken_where_it_is_faster() -> None:
    free, plain = result_of("llama-4", **DEEP), result_of("llama-4", schedule="1f1b", **DEEP)
    assert (plain.plan.schedule, free.plan.schedule) == ("1f1b", "zb_h1")
    assert free.plans[0].configuration.schedule == "zb_h1"
    assert free.plans[0].seconds < plain.plans[0].seconds * (1 - WORTH)
    assert free.plans[0].objective == plain.plans[0].objective


def test_one_rank_has_no_schedule_to_choose() -> None:
    assert result_of("llama-4", pipeline=1).plan.schedule == "1f1b"
    with refused(RequestError, "schedule = zb_h1", 2, "pipeline = 1"):
        result_of("llama-4", pipeline=1, schedule="zb_h1")


@pytest.mark.parametrize("own", [1.0, 0.5])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 1), (4, 2), (8, 4), (8, 8), (4, 16)])
def test_what_is_expected_of_weight_gradients_apart_is_what_equal_ranks_take(
    ranks: int, micro_batches: int, own: float
) -> None:
    def seconds(schedule: str, backward: float, apart: float) -> float:
        passes = [(PassSeconds(computation=one, blocking=0, overlapped=0),) for one in (1.0, backward, apart) if one]
        names = ("forward", "backward", "weight_gradient")
        rank = RankSeconds(chunks=(ChunkSeconds(**dict(zip(names, passes, strict=False))),))
        return simulate([rank] * ranks, schedule_orders(schedule, ranks, micro_batches), record=False).seconds

    configuration = Configuration(pipeline=ranks, mesh=(1,), micro_batches=micro_batches)
    in_order, apart = seconds("1f1b", 1 + own, 0), seconds("zb_h1", 1, own)
    assert apart_seconds(configuration, in_order, own * micro_batches) == pytest.approx(apart)
    assert in_1f1b(configuration, apart, own * micro_batches) == pytest.approx(in_order)
    if own == 1:
        assert apart_seconds(configuration, in_order) == pytest.approx(apart)


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1", "interleaved_1f1b", "eager_1f1b"])
def test_a_schedule_is_pinned(schedule: str) -> None:
    plan = result_of("llama-4", pipeline=2, schedule=schedule, micro_batches=4).plan
    assert (plan.schedule, plan.pipeline) == (schedule, 2)
    assert (plan.virtual_stages > 1) == (schedule == "interleaved_1f1b")


@pytest.mark.parametrize("schedule", ["zb_v", "dualpipe_v"])
def test_stages_in_a_v_are_pinned(schedule: str) -> None:
    """Two stages a rank, and it is proved how busy ranks are."""
    found = result_of("llama-4", pipeline=2, schedule=schedule, micro_batches=4)
    assert (found.plan.schedule, found.plan.pipeline, found.plan.virtual_stages) == (schedule, 2, 2)
    assert [stage.blocks for stage in found.plan.stages] == [1, 1, 1, 1]
    assert 0 < found.bound_seconds < found.plan.prediction.step_seconds
    with refused(RequestError, schedule, 8, 4):
        result_of("llama-4", pipeline=4, schedule=schedule)


@pytest.mark.parametrize("schedule", ["zb_v", pytest.param("dualpipe_v", marks=pytest.mark.thorough)])
def test_no_plan_in_a_v_is_faster_than_its_ranks_are_busy(schedule: str) -> None:
    """And with many micro-batches that is most of what they take."""
    bound = result_of("residual-8", pipeline=2, schedule=schedule).bound_seconds
    for micro_batches in (2, 4, 8):
        found = result_of("residual-8", pipeline=2, schedule=schedule, micro_batches=micro_batches)
        assert bound <= found.bound_seconds <= found.plan.prediction.step_seconds * (1 + 1e-9)
        (ranked, *_) = found.plans
        assert ranked.found is not None
        assert bound <= ranked.found.busy <= ranked.seconds * (1 + 1e-9)
    assert found.bound_seconds > 0.8 * found.plan.prediction.step_seconds


@pytest.mark.parametrize("expert", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_passes_that_run_together_cover_what_experts_exchange_and_nothing_else(expert: int) -> None:
    """A step takes no less than its ranks compute, which is most of it with many micro-batches."""
    own = Pinned(pipeline=2, expert=expert, schedule="dualpipe_v", micro_batches=16, expert_overlap=True)
    cluster = with_quick_host(cluster_of("h100-80gb", 2 * expert))
    found = search(request_of("mixture-after-two-dense", cluster, 64, pinned=own))
    seconds = found.plan.prediction.step_seconds
    assert found.plan.training.expert_overlap
    assert 0.6 * seconds < found.bound_seconds <= seconds
    assert found.apart is None  # nothing was asked of others


def test_one_rank_of_a_v_has_both_ends_of_the_model() -> None:
    """Which take longer than a block, and all have whole blocks: the average rank says less (85% of the step)."""
    cluster, pinned = cluster_of("h100-80gb", 4), Pinned(pipeline=4, mesh=(1,), schedule="zb_v", micro_batches=8)
    found = search(request_of("residual-8", cluster, 32, pinned=pinned))
    assert 0.93 < found.bound_seconds / found.plan.prediction.step_seconds <= 1 + 1e-9


@pytest.mark.parametrize("micro_batches", [4, 16])
def test_weights_that_both_ends_of_a_v_share_are_updated_once(micro_batches: int) -> None:
    """On one rank, which sums no gradient with another."""
    cluster = launched_at_once(cluster_of("h100-80gb", 2))
    pinned = Pinned(pipeline=2, micro_batches=micro_batches, schedule="zb_v", recompute="none")
    found = search(request_of("gpt-4-tied", cluster, micro_batches, pinned=pinned))
    assert 0.9 < found.bound_seconds / found.plan.prediction.step_seconds <= 1 + 1e-9


def test_pipelines_with_fewer_blocks_than_stages_in_a_v_bound_none() -> None:
    """Where a free search takes its plan in a V: of pipelines of 8 blocks one with 8 ranks has no room for it."""
    request = request_of("residual-8", cluster_of("h100-80gb", 8), 32)
    shallow = [least_in_a_v(replace(request, pinned=Pinned(pipeline=ranks)), Shared()) for ranks in (2, 4)]
    assert least_in_a_v(request, Shared()) == min(shallow)
    assert least_in_a_v(replace(request, pinned=Pinned(pipeline=8)), Shared()) == math.inf


def test_every_micro_batch_passes_all_stages_of_a_v() -> None:
    """With one, that takes longer than ranks work; and the bound that says so is no more than a step."""
    pinned = Pinned(pipeline=2, mesh=(4,), schedule="zb_v", micro_batches=1)
    found = search(request_of("llama70b-4-layers", cluster_of("h100-80gb", 8), 8, precision="bf16", pinned=pinned))
    (ranked, *_) = found.plans
    assert ranked.found is not None
    assert 1.1 * ranked.found.busy < found.bound_seconds <= ranked.seconds * (1 + 1e-9)


@pytest.mark.parametrize(("micro_batches", "tried"), [(2, ["zb_v"]), (16, ["zb_v", "dualpipe_v"])])
def test_orders_in_a_v_with_the_same_turns_are_tried_once(
    micro_batches: int, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    def divided(_: Finalists, configuration: Configuration, gathers: str, best: Ranked) -> None:
        asked.append(configuration.schedule)

    monkeypatch.setattr(Finalists, "_divided_for_a_v", divided)
    cluster, pinned = cluster_of("h100-80gb", 4), Pinned(pipeline=4, mesh=(1,), micro_batches=micro_batches)
    search(request_of("residual-8", cluster, 16, pinned=pinned, update=PLAIN))
    assert list(dict.fromkeys(asked)) == tried


def test_plans_with_equal_and_unequal_virtual_stages_are_divided_anew_into_the_same_v() -> None:
    outcome = SimpleNamespace(gathers="ahead")
    one = Configuration(pipeline=4, mesh=(2,), micro_batches=8)
    several = replace(one, virtual_stages=2, schedule="interleaved_1f1b")
    found = (one, several, replace(several, uneven=True))
    laid = {_in_order(cast(Any, SimpleNamespace(configuration=c, outcome=outcome)), "zb_v") for c in found}
    assert laid == {(replace(one, schedule="zb_v"), "ahead")}


def test_no_pipelines_are_evaluated_for_other_orders_once_a_search_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at, evaluate = list[int](), OtherSchedules._evaluate_for_deferred_gradients

    def counted(self: OtherSchedules, slowest: float, gradients: float, *, piped: bool) -> None:
        self.cancelled, before = (lambda: bool(looked_at)), len(self.record.evaluated)
        evaluate(self, slowest, gradients, piped=piped)
        looked_at.append(len(self.record.evaluated) - before)

    monkeypatch.setattr(OtherSchedules, "_evaluate_for_deferred_gradients", counted)
    request = request_of("llama-4", cluster_of("h100-80gb", 4), 8, update=PLAIN)
    search(request)
    search(request)
    assert looked_at[0] > looked_at[1] == 0


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "hardware", "asked", "pinned"),
    [
        ("bert-base+num_layers=4", "b200", {"devices": 4, "global_batch": 16}, {"pipeline": 2, "micro_batches": 1}),
        (
            "llama8b+num_layers=16",
            "h100",
            {"devices": 16, "global_batch": 16, "seq_len": 2048, "pinned": {"pipeline": 8}},
            {"pipeline": 8, "micro_batches": 16, "tensor": 2, "schedule": "dualpipe_v"},
        ),
        (  # as first found in a V this takes half as long again
            "gpt2-medium",
            "ascend-910b-64gb",
            {"devices": 32, "global_batch": 64, "pinned": {"pipeline": 4}},
            {"pipeline": 4, "micro_batches": 8, "schedule": "dualpipe_v"},
        ),
        (  # others looked at before promise a little more than plans without a pipeline take
            "bert-large",
            "h100",
            {"devices": 64},
            {"pipeline": 2, "micro_batches": 2, "mesh": (32,), "schedule": "zb_v"},
        ),
    ],
)
def test_few_micro_batches_are_found_in_a_v_by_a_free_search(
    model: str, hardware: str, asked: dict[str, Any], pinned: dict[str, Any]
) -> None:
    """Sums of 1F1B say that pipelines with so few take much longer than others."""
    free = planner.search(model, hardware, **asked).plan.prediction.step_seconds
    decided = planner.search(model, hardware, **{**asked, "pinned": pinned}).plan.prediction.step_seconds
    assert free <= decided * (1 + WORTH)


@pytest.mark.thorough
@pytest.mark.slow
def test_stages_lie_in_a_v_where_a_pipeline_is_idle_and_nobody_decided() -> None:
    """As fast as where such an order is asked for, and without a proof that is about others."""

    def found(**pinned: Any) -> Any:
        given = {"pipeline": 4, "micro_batches": 6, **pinned}  # of which 1F1B can interleave no rounds of four
        return planner.search(
            "gpt2-xl", devices=8, hardware="v100-32gb", precision="bf16", global_batch=24, pinned=given
        )

    free, asked, straight = found(), found(schedule="zb_v"), found(virtual_stages=1)
    seconds = free.plan.prediction.step_seconds
    assert free.plan.schedule in IN_A_V
    assert len(free.plan.stages) == 8
    assert straight.plan.schedule not in IN_A_V
    assert seconds < straight.plan.prediction.step_seconds * (1 - WORTH)
    assert seconds < asked.plan.prediction.step_seconds * (1 + WORTH)
    assert free.plan.provenance.status == "feasible"
    assert free.plan.provenance.gap == pytest.approx(asked.plan.provenance.gap, abs=0.01)


@pytest.mark.thorough
@pytest.mark.slow
def test_one_and_several_stages_on_each_rank_are_laid_in_the_same_v_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found, searches = list[tuple[object, ...]](), list[Finalists]()  # which keep their identities
    divided = Finalists._divided_for_a_v

    def noted(self: Finalists, c: Configuration, gathers: str, best: Ranked) -> Ranked | None:
        searches.append(self)
        found.append((id(self), c.family, c.micro_batches, gathers, c.schedule))
        return divided(self, c, gathers, best)

    monkeypatch.setattr(Finalists, "_divided_for_a_v", noted)
    options: dict[str, Any] = {"devices": 4, "global_batch": 4, "precision": "bf16", "simplicity": 0.0}
    planner.search("llama-tiny", "cpu", pinned={"pipeline": 2, "micro_batches": 2}, **options)
    assert found
    assert len(found) == len(set(found))


def test_a_plan_in_a_v_takes_the_place_of_none_in_a_list_of_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest without it is the second then, also where the V was made of a slower one."""
    pinned = Pinned(pipeline=4, micro_batches=4)
    request = replace(request_of("llama-12", cluster_of("h100-80gb", 4), 16, pinned=pinned, update=PLAIN), top=2)
    plain = search(request).plans
    (laid,) = search(replace(request, pinned=replace(pinned, schedule="zb_v"))).plans
    faster = replace(laid.plan.prediction, step_seconds=plain[0].seconds / 2)
    laid = replace(laid, bound=replace(laid.bound, plan=replace(laid.plan, prediction=faster)))
    monkeypatch.setattr(Finalists, "_in_a_v", lambda _, best: laid)
    found = search(request).plans
    assert [one.configuration for one in found] == [laid.configuration, plain[0].configuration]
    assert found[1].seconds == plain[0].seconds


def test_finalists_that_cannot_win_are_neither_settled_nor_sought_in_a_v(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan in a V has to beat the step that is known, not what its sum has with the bubble of 1F1B."""
    pinned = Pinned(pipeline=2, micro_batches=4)
    request = request_of("llama-4", cluster_of("h100-80gb", 4), 8, pinned=pinned, update=PLAIN)
    attempt = Attempt(request, SearchOptions(), Shared())
    attempt.run()
    finalists = attempt.early.finalists_of(attempt.found.contenders.found)
    (found, *_) = finalists.found
    settled, cutoffs, best_of = list[Ranked](), list[float](), Finalists._best_of

    def noted(self: Finalists, found: Contender, cutoff: float) -> Ranked:
        cutoffs.append(cutoff)
        return best_of(self, found, cutoff)

    def unsettled(self: PlanMaker, ranked: Ranked) -> Ranked:
        settled.append(ranked)
        return ranked

    monkeypatch.setattr(Finalists, "_best_of", noted)
    monkeypatch.setattr(PlanMaker, "worth_settling", unsettled)
    finalists._best_of(found, found.outcome.bound / 2)
    assert not settled
    finalists._best_of(found, math.inf)
    assert settled
    best = finalists._best_of(found, math.inf)
    finalists._divided_for_a_v(replace(found.configuration, schedule=IN_A_V[0]), found.outcome.gathers, best)
    assert cutoffs[-1] == best.seconds


@pytest.mark.parametrize(
    ("blocks", "ranks", "counts"),
    [
        ([1.0] * 8, 2, (2, 2, 2, 2)),
        ([1.0] * 9 + [2.0], 2, (2, 3, 3, 2)),  # 5.0 + 6.0 of 11: the first rank has the last stage
        ([0.5, 0.5, *[1.0] * 6], 2, (1, 2, 2, 3)),
    ],
    ids=str,
)
def test_blocks_are_divided_over_a_v(blocks: list[float], ranks: int, counts: tuple[int, ...]) -> None:
    assert v_counts(blocks, ranks) == counts


@pytest.mark.parametrize(
    ("pinned", "words"),
    [
        ({"schedule": "zb-h1"}, ("unknown schedule 'zb-h1'", "zb_h1")),
        ({"schedule": "interleaved_1f1b", "virtual_stages": 1}, ("takes virtual_stages = 2 or more",)),
        ({"schedule": "zb_v", "virtual_stages": 4}, ("two stages on each rank, in a V", "virtual_stages = 4")),
        ({"schedule": "gpipe", "virtual_stages": 2}, ("one stage on each rank", "take interleaved_1f1b")),
    ],
    ids=str,
)
def test_what_contradicts_is_named(pinned: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(RequestError) as caught:
        result_of("llama-4", **pinned)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_what_a_schedule_holds_must_fit() -> None:
    """GPipe holds all micro-batches, which is more than the sums of the search say: a plan is found again, with as much
    less as that takes, and refused where nothing is as lean."""
    roomy = result_of("llama-4", schedule="gpipe", **DEEP).plan.prediction
    lean = result_of("llama-4", roomy.peak_bytes * 0.999999, schedule="gpipe", **DEEP).plan.prediction
    assert lean.peak_bytes < roomy.peak_bytes * 0.999999
    assert lean.step_seconds > roomy.step_seconds
    with refused(InfeasibleError, "the leanest plan evaluated needs"):
        result_of("llama-4", lean.peak_bytes * 0.99, schedule="gpipe", **DEEP)


def test_values_that_all_blocks_read_are_handed_on() -> None:
    plan = result_of("residual-mask", pipeline=4, micro_batches=4).plan
    assert plan.pipeline == 4


@pytest.mark.slow
def test_pipelines_that_are_left_out_by_the_bubble_of_1f1b_contend() -> None:
    """Two ranks have the longer sum, and with weight gradients apart the shorter step; four were not evaluated."""
    request = request_of("residual", with_quick_host(cluster_of("ascend-910b-64gb", 4)), 8, update=PLAIN)
    free = search(request).plan
    assert (free.schedule, free.pipeline) == ("zb_h1", 2)
    for ranks in (1, 2, 4):
        pinned = Pinned(pipeline=ranks, micro_batches=1)
        alone = search(replace(request, pinned=pinned)).plan.prediction.step_seconds
        assert free.prediction.step_seconds <= alone * (1 + 1e-9)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_plan_that_another_order_makes_the_fastest_is_not_left_out() -> None:
    """Of sums that are close, a pipeline's is the larger one; but for its bubble, which zero bubble fills, it is the
    smaller."""
    request = request_of("llama-tiny", with_quick_host(cluster_of("h100-80gb", 2)), 8, update=PLAIN)
    whole = search(request)
    pipelined = search(replace(request, pinned=Pinned(pipeline=2, virtual_stages=1)))
    alone = search(replace(request, pinned=Pinned(pipeline=1)))
    assert alone.plans[0].objective < pipelined.plans[0].objective
    assert pipelined.plans[0].seconds < alone.plans[0].seconds
    assert whole.plans[0].seconds == pipelined.plans[0].seconds


@pytest.mark.slow
def test_a_pipeline_is_not_left_out_by_its_bubble_where_the_best_sum_has_none() -> None:
    """No pipeline contends by its sum, 5% above that of one stage; with weight gradients apart one is the fastest."""
    request = request_of("llama-tiny", cluster_of("cpu", 2), 32, update=PLAIN)
    pipelined = search(replace(request, pinned=Pinned(pipeline=2, virtual_stages=1)))
    alone = search(replace(request, pinned=Pinned(pipeline=1)))
    assert pipelined.plans[0].objective > alone.plans[0].objective * (1 + NEAR)
    assert pipelined.plans[0].seconds < alone.plans[0].seconds
    assert search(request).plans[0].seconds <= pipelined.plans[0].seconds


@pytest.mark.thorough
@pytest.mark.slow
def test_what_another_order_made_the_fastest_is_kept_where_the_search_goes_on() -> None:
    """A pipeline that does not contend by its sum is the fastest in another order, and slower sums are looked at."""
    free, decided = (
        planner.search(
            "llama-tiny", "cpu", devices=4, global_batch=4, precision="bf16", pinned=pinned, simplicity=0.0
        ).plan.prediction.step_seconds
        for pinned in ({}, {"pipeline": 4, "micro_batches": 4})
    )
    assert free <= decided * (1 + 1e-9)


@pytest.mark.parametrize(("needed", "third"), [(0.75, 0.75), (None, 0.75), (0.6, 0.6), (0.3, 0.75)])
def test_between_memory_that_is_too_little_and_an_overfull_plan_something_fits(
    monkeypatch: pytest.MonkeyPatch, needed: float | None, third: float
) -> None:
    tried, original = list[float](), Attempt.run

    def run(self: Attempt) -> SearchResult:
        tried.append(self.memory)
        if len(tried) == 1:
            raise OverfullError(0.6 * self.memory, 0.0, "overfull")
        if len(tried) == 2:
            raise InfeasibleError("too lean", needed=None if needed is None else needed * tried[0])
        return original(self)

    monkeypatch.setattr(Attempt, "run", run)
    found = search(request_of("perceptron", cluster_of("h100-80gb", 2), 8))
    assert tried[1:] == pytest.approx([0.5 * tried[0], third * tried[0]])
    assert found.bound_seconds == 0.0  # less memory proves nothing


def test_memory_that_was_too_little_is_not_searched_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plan that is overfull once more, what it lacks may be more than what is known to be too much."""
    tried, original = list[float](), Attempt.run

    def run(self: Attempt) -> SearchResult:
        tried.append(self.memory)
        if len(tried) == 2:
            raise InfeasibleError("too lean")
        if len(tried) < 4:
            raise OverfullError(0.5 * self.memory, 0.0, "overfull")
        return original(self)

    monkeypatch.setattr(Attempt, "run", run)
    search(request_of("perceptron", cluster_of("h100-80gb", 2), 8))
    assert tried[1:] == pytest.approx([0.5 * tried[0], 0.75 * tried[0], 0.625 * tried[0]])


def test_after_an_overfull_plan_devices_have_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a plan lacks less than the margin that is left for the error of its prediction."""
    capacities, original = list[float](), Attempt.run

    def run(self: Attempt) -> SearchResult:
        capacities.extend(self.engine.capacities)
        if len(capacities) == 1:
            raise OverfullError(0.01 * self.memory, 0.0, "overfull")
        return original(self)

    monkeypatch.setattr(Attempt, "run", run)
    search(request_of("perceptron", cluster_of("h100-80gb", 2), 8))
    assert capacities[1] < 0.995 * capacities[0]


def test_memory_next_to_that_of_an_overfull_plan_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[float]()

    def run(self: Attempt) -> SearchResult:
        tried.append(self.memory)
        if len(tried) == 1:
            raise OverfullError(0.1 * self.memory, 0.0, "overfull", needed=1.1 * self.memory)
        raise InfeasibleError("too lean", needed=0.995 * tried[0])

    monkeypatch.setattr(Attempt, "run", run)
    with pytest.raises(InfeasibleError, match="overfull") as found:
        search(request_of("perceptron", cluster_of("h100-80gb", 2), 8))
    assert len(tried) == 2
    assert found.value.needed == 1.1 * tried[0]


@pytest.mark.slow
@pytest.mark.thorough
def test_what_is_proved_with_less_memory_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of the embedding holds more than the mean that the search counts on, so that it leaves more room."""
    bounds, original = list[float](), Attempt.run

    def run(self: Attempt) -> SearchResult:
        try:
            return original(self)
        except OverfullError as error:
            bounds.append(error.bound)
            raise

    monkeypatch.setattr(Attempt, "run", run)
    monkeypatch.setattr(room, "_LEANER", 0)  # contenders are not found again by themselves
    found = planner.search(
        "llama8b", "h100-80gb", devices=64, seq_len=2048, global_batch=64, memory_limit=64 * 2**30,
        pinned=Pinned(tensor=1, context=1, pipeline=1, zero=1), update=Update(zero_by="parameters"),
    )  # fmt: skip
    assert bounds
    assert found.bound_seconds <= bounds[0]
    assert found.plan.prediction.peak_bytes <= 64 * 2**30
    with refused(InfeasibleError, "zero_by = parameters", "take slices"):
        planner.search(
            "llama8b", "h100-80gb", devices=64, seq_len=2048, global_batch=64, memory_limit=56 * 2**30,
            pinned=Pinned(tensor=1, context=1, pipeline=1, zero=1), update=Update(zero_by="parameters"),
        )  # fmt: skip


def test_slices_are_priced_as_far_as_a_shorter_bubble_may_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan takes without its bubble is no more than what it takes so in slices, and in more of them."""
    priced, cluster, found = list[Plan](), cluster_of("h100-80gb", 4), result_of("llama-4", slices=1, **DEEP).bound

    def noted(bound: BoundPlan, machine: Machine) -> Prediction:
        prediction = predict(bound, machine)
        priced.append(replace(bound.plan, prediction=prediction))
        return prediction

    def without_bubble(plan: Plan) -> float:
        return plan.prediction.step_seconds - dict(plan.prediction.time)[PIPELINE_BUBBLE]

    monkeypatch.setattr(scheduling, "predict", noted)
    scheduling.with_turns(found, Pinned(), cluster, [math.inf] * 4, without_bubble(found.plan))
    assert not priced
    monkeypatch.setattr(scheduling, "WORTH", -1e3)  # whatever they take
    scheduling.with_turns(found, Pinned(), cluster, [math.inf] * 4)
    seconds = [without_bubble(plan) for plan in (found.plan, *priced)]
    assert [plan.slices for plan in priced] == [2, 4, 8, 16]
    assert seconds == sorted(seconds)
    priced.clear()
    monkeypatch.setattr(scheduling, "WORTH", 1 - (seconds[1] + seconds[2]) / 2 / found.plan.prediction.step_seconds)
    scheduling.with_turns(found, Pinned(), cluster, [math.inf] * 4)
    assert [plan.slices for plan in priced] == [2, 4]  # of which the latter says that more are of no use


@pytest.mark.cases(5)
@pytest.mark.parametrize("model", ["llama-4", "llama-4-words"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("pinned", [{"tensor": 2}, {"tensor": 1, "zero": 1}], ids=str)
def test_interleaved_micro_batches_hold_twice_the_activations_at_least(
    model: str, recompute: str, pinned: dict[str, Any]
) -> None:
    """So they are priced only if there may be memory for them."""
    cluster = cluster_of("h100-80gb", 4)
    found = result_of(model, pipeline=1, micro_batches=4, interleave=1, recompute=recompute, **pinned).bound
    least = scheduling.least_interleaved_bytes(found.plan)
    assert least > found.plan.prediction.peak_bytes
    for number in (2, 4):
        training = replace(found.plan.training, interleave=number)
        other = bind_prepared(replace(found.plan, training=training), found.whole, found.blocks)
        assert predict(other, cluster).peak_bytes >= least * (1 - 1e-12)
    with_room, without = (scheduling.with_turns(found, Pinned(), cluster, [share * least]) for share in (2.0, 0.999))
    assert without is found
    assert with_room.plan.prediction.step_seconds <= found.plan.prediction.step_seconds


def test_other_degrees_are_tried_in_a_v_where_experts_exchange_under_other_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What sums count as exposed may be covered there, so that no sum says which degree is best."""
    asked = set[tuple[str, int]]()

    def divided(_: Finalists, configuration: Configuration, gathers: str, best: Ranked) -> None:
        asked.add((configuration.schedule, configuration.pipeline))

    monkeypatch.setattr(Finalists, "_divided_for_a_v", divided)
    monkeypatch.setattr(Ranked, "waited", property(lambda ranked: ranked.seconds))
    for model in ("mixture-after-two-dense", "llama-4"):
        asked.clear()
        search(request_of(model, cluster_of("h100-80gb", 2), 8, update=PLAIN))
        assert (("dualpipe_v", 2) in asked) == (model == "mixture-after-two-dense"), model
