"""Weights of a block that are gathered together, in the search: its sums are those of the prediction, and no plan takes
less."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest

import planner
from hardware_profiles import Cluster, load_software
from planner.errors import RequestError
from planner.plan.binding.bind import bind
from planner.plan.layout.segments import segments_by_stage
from planner.plan.plan import Plan
from planner.plan.prediction.predict import predict, stage_costs
from planner.plan.prediction.step import PassCost
from planner.pricing.message import Message, message_seconds
from planner.sharding.buckets import Bucket
from planner.sharding.update import GATHERS, PLAIN, Update
from planner.strategy_search.decomposition.crossings import crossing_seconds
from planner.strategy_search.finalists.proofs import OPTIMAL, Ranked, bounded_seconds
from planner.strategy_search.job import machine_from
from planner.strategy_search.request.space import Configuration, Pinned
from planner.strategy_search.search import search
from tests.refusals import refused
from tests.unit.search.cases import (
    BATCH,
    cluster_of,
    columns_of,
    keepable,
    make_case,
    plan_of,
    random_ranks,
    random_state,
    request_of,
    total,
    traced,
    with_own_network,
    with_quick_host,
)
from tests.unit.search.test_tables_equal_prediction import check_bytes, same

TOGETHER = Update(buckets="none", gathers="block")


@pytest.mark.cases(1, 3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "pipeline"),
    [
        ("llama-4", (2, 2), 1),
        ("gpt-4-tied", (4,), 2),
        ("mixture", (4,), 1),
        ("kinds-in-turn", (2,), 2),
        ("mixture-after-dense", (4,), 1),
    ],
)
@pytest.mark.parametrize("gathers", ["block", "ahead"])
@pytest.mark.parametrize("dtype", ["mixed", "fp32"])
def test_the_pieces_and_the_prediction_agree(
    model: str, mesh: tuple[int, ...], pipeline: int, dtype: str, gathers: str
) -> None:
    draw, update = random.Random(model), Update(buckets="none", gathers=gathers, gradient_dtype=dtype)
    configuration = Configuration(pipeline=pipeline, mesh=mesh, micro_batches=4)
    case = make_case(model, "h100-80gb", configuration, 16, "bf16", update=update)
    beyond = []
    for _ in range(6):
        state = random_state(case, draw)
        ranks = random_ranks(case, draw, state)
        bound = bind(plan_of(case, ranks), traced(model), BATCH)
        for rank, cost in enumerate(stage_costs(bound, case.cluster)):
            columns = columns_of(case, ranks, rank)
            part = (
                total(columns, "part")
                + total(columns, "under")
                + float(crossing_seconds(case.chain, case.setting, rank)[state])
            )
            assert same(part, math.fsum(cost.micro_batch.values()))
            check_bytes(case, state, ranks, rank, cost, model)
            beyond.append(sum(cost.together.values()))
        prediction = predict(bound, case.cluster)
        assert same(math.fsum(value for _, value in prediction.time), prediction.step_seconds)
    assert min(beyond) >= 0, "a share is the least that a message can take"
    assert max(beyond) > 0


@pytest.mark.parametrize(
    ("zero", "buckets", "gathers"), [(3, "none", "block"), (3, "none", "ahead"), (1, 2**20, "each")]
)
def test_copies_beside_messages_take_as_long_whatever_goes_together(zero: int, buckets: Any, gathers: str) -> None:
    """FSDP copies what it has gathered or will scatter: bytes of every weight, in however many messages they come."""
    software = load_software("fsdp")
    cluster = cluster_of("h100-80gb", 4).with_software(software)
    bare = cluster.with_software(replace(software, copies_out=False))

    def copies(own: Update) -> dict[str, float]:
        plan = search(request_of("llama-4", cluster, 16, pinned=Pinned(data=4, zero=zero, micro_batches=1))).plan
        bound = bind(replace(plan, training=replace(plan.training, update=own)), traced("llama-4"), BATCH)
        with_copies, without = (dict(predict(bound, one).time) for one in (cluster, bare))
        parts = ("parameter gathering", "gradient reduction of micro-batches", "gradient reduction", "weight gathering")
        return {part: with_copies.get(part, 0.0) - without.get(part, 0.0) for part in parts}

    alone = copies(Update(buckets="none"))
    assert sum(alone.values()) > 0
    assert copies(Update(buckets=buckets, gathers=gathers)) == pytest.approx(alone, rel=1e-9)


@pytest.mark.cases(1, 3)
@pytest.mark.slow
@pytest.mark.parametrize("slower", [1, 30, 1e3])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_no_sum_of_a_plan_whose_weights_come_ahead_is_less_than_the_bound(pipeline: int, slower: float) -> None:
    """Whether its messages are shorter than its work or longer."""
    pinned = Pinned(pipeline=pipeline, micro_batches=4)
    check_bound(cluster_of("h100-80gb", 4), slower, pinned, Update(buckets="none", gathers="ahead"))


@pytest.mark.cases(5, 4)
@pytest.mark.parametrize("slower", [1, 1e3])
@pytest.mark.parametrize(("pipeline", "micro_batches"), [(1, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize("model", ["entered", "entered-by-one"])
def test_no_plan_takes_less_than_a_bound_that_has_what_stands_before_the_blocks(
    model: str, pipeline: int, micro_batches: int, slower: float
) -> None:
    """Nothing covers what the first pass of a step begins with, nor the gradients with which the last one ends."""
    pinned = Pinned(pipeline=pipeline, micro_batches=micro_batches)
    check_bound(cluster_of("h100-80gb", 4), slower, pinned, Update(buckets="none", gathers="ahead"), model)


@pytest.mark.cases(2, 4)
@pytest.mark.slow
@pytest.mark.parametrize("slower", [3, 30, 300])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("model", ["llama-4", "entered", "chain-from-input", "kinds-in-turn"])
def test_no_plan_takes_less_than_a_bound_on_what_a_last_pass_covers(
    model: str, micro_batches: int, slower: float
) -> None:
    """No gradients are reduced before the first slot of the pass is over."""
    fast, update = cluster_of("h100-80gb", 4), Update(buckets=2**12, gathers="ahead")
    check_bound(fast, slower, Pinned(pipeline=1, micro_batches=micro_batches), update, model)
    for data, zero in ((4, 0), (4, 1), (2, 2)):
        pinned = Pinned(pipeline=1, micro_batches=micro_batches, data=data, zero=zero)
        check_bound(fast, slower, pinned, update, model, drawn=0)


def test_what_the_first_pass_begins_with_is_waited_for_and_bounded() -> None:
    """Four weights before the blocks, more than all of these: an eighth of the step."""
    pinned = Pinned(data=4, zero=3, micro_batches=1, recompute="none")
    fast = with_quick_host(cluster_of("h100-80gb", 4))
    slow = replace(fast, levels=tuple(replace(one, bandwidth=one.bandwidth / 100) for one in fast.levels))
    update = Update(buckets="none", gathers="ahead")
    found = search(request_of("entered", slow, 16, pinned=pinned, update=update, precision="bf16"))
    (cost,) = stage_costs(found.plans[0].bound, slow)
    step, uncovered = found.plan.prediction.step_seconds, sum(one.longer for one in cost.chunks[0].passes)
    assert uncovered > 0.12 * step
    assert step - uncovered / 4 < found.bound_seconds <= step


def check_bound(
    fast: Cluster, slower: float, pinned: Pinned, update: Update, model: str = "llama-4", drawn: int = 20
) -> None:
    """No plan of four blocks that is drawn has a sum below the bound, on links that are so many times slower; nor one
    of ranks that launch ahead, or a step, where it is no pipeline."""
    assert pinned.pipeline is not None
    draw = random.Random(pinned.pipeline)
    number = pinned.micro_batches or 4
    configuration = Configuration(pipeline=pinned.pipeline, mesh=(4 // pinned.pipeline,), micro_batches=number)
    cluster = replace(fast, levels=tuple(replace(one, bandwidth=one.bandwidth / slower) for one in fast.levels))
    case = replace(make_case(model, "h100-80gb", configuration, 16, "bf16", update=update), cluster=cluster)
    found = search(request_of(model, cluster, 16, pinned=pinned, update=update, precision="bf16"))
    plans = [found.plan, *(plan_of(case, random_ranks(case, draw, random_state(case, draw))) for _ in range(drawn))]
    priced = [predict(bind(plan, traced(model), BATCH), cluster) for plan in plans]
    sums = [one.objective_seconds for one in priced]
    assert found.bound_seconds <= min(sums) * (1 + 1e-9)
    compared = [bounded_seconds(replace(one, prediction=own)) for one, own in zip(plans, priced, strict=True)]
    assert found.bound_seconds <= min(compared) * (1 + 1e-9)
    if pinned.pipeline == 1:
        assert compared == [one.step_seconds for one in priced]
    if not found.plan.schedule_kind.v_shaped:  # of which the work alone is bounded
        assert found.bound_seconds > 0.7 * sums[0]


@pytest.mark.parametrize("model", ["post-norm", "chain-from-input-4"])
def test_what_is_kept_and_not_run_again_hides_nothing(model: str) -> None:
    """A recomputed block that keeps results has less work in its backward pass under which weights may come."""
    configuration = Configuration(pipeline=1, mesh=(4,), micro_batches=2)
    update = Update(buckets="none", gathers="ahead")
    chain = make_case(model, "h100-80gb", configuration, 16, "bf16", update=update).chain
    (piece,) = [piece for piece in chain.inner if piece.recompute]
    candidates = dict.fromkeys(piece.keys, 0)
    again, kept = piece.amounts_of(candidates, ()), piece.amounts_of(candidates, keepable(piece))
    assert kept.part < again.part
    assert kept.excess_backward - again.excess_backward == pytest.approx(again.part - kept.part)
    assert kept.excess_forward == again.excess_forward


def test_a_plan_says_so_and_is_faster() -> None:
    pinned = Pinned(data=4, zero=3, micro_batches=1, recompute="none")
    alone, together = (
        search(request_of("llama-4", with_own_network(cluster_of("cpu", 4)), 16, pinned=pinned, update=update)).plans[0]
        for update in (PLAIN, TOGETHER)
    )
    assert together.plan.training.update == TOGETHER
    assert together.seconds < alone.seconds
    assert together.objective <= together.seconds * (1 + OPTIMAL)


def test_what_comes_ahead_is_hidden() -> None:
    """The first gather of a step sets out under what stands before the blocks, too short to hide it, the first of the
    pass back under the end of the pass forward, and behind the last reduction is the gradient of the embedding."""
    pinned = Pinned(data=4, zero=3, micro_batches=1, recompute="none")
    cluster = with_own_network(cluster_of("cpu", 4))
    (together,) = search(request_of("llama-4", cluster, 16, pinned=pinned, update=TOGETHER)).plans[:1]
    plan = together.plan
    ahead = replace(plan, training=replace(plan.training, update=Update(buckets="none", gathers="ahead")))
    by_block, hidden = (predict(bind(one, traced("llama-4"), BATCH), cluster) for one in (plan, ahead))
    waited, found = dict(by_block.time), dict(hidden.time)
    assert found["parameter gathering"] == pytest.approx(waited["parameter gathering"]), "all of it is sent"
    saved = -found["gathering under computation"]
    assert hidden.step_seconds == pytest.approx(by_block.step_seconds - saved + found["uncovered communication"])
    stage = segments_by_stage(bind(ahead, traced("llama-4"), BATCH))[0]
    runs = [segment.gathers for segment in stage if segment.gathers]
    assert len(runs) == 5, "four blocks and the head"
    hides = [one.there for run in runs for one in run]
    hides += [one.there for run in runs for one in run if one.again]
    hides += [one.back for run in runs for one in run]
    assert saved == pytest.approx(sum(seconds_of(bucket, plan, cluster) for bucket in hides))
    assert math.fsum(seconds for _, seconds in hidden.time) == pytest.approx(hidden.step_seconds)


def test_what_is_uncovered_once_counts_as_far_as_messages_leave_a_gap() -> None:
    assert PassCost(work=10.0, hidden=3.0, uncovered=1.0).longer == pytest.approx(1.0)
    assert PassCost(work=10.0, hidden=10.4, uncovered=1.0).longer == pytest.approx(0.6)
    assert PassCost(work=10.0, hidden=12.0, uncovered=1.0).longer == 0  # one after the other, whenever they set out


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_stage_that_begins_with_a_gather_waits_for_its_last_gradients_once_a_step(schedule: str) -> None:
    """Its first gather sets out before it waits for the stage before. Without a flush weights change in between, and
    each pass waits for its own. In the first stage the lookup of an embedding covers as much of it as it takes."""
    pinned = Pinned(pipeline=2, data=2, zero=3, micro_batches=4, recompute="none", schedule=schedule)
    cluster = with_own_network(cluster_of("cpu", 4))
    update = Update(buckets="none", gathers="ahead")
    plan = search(request_of("llama-4", cluster, 16, pinned=pinned, update=update)).plans[0].plan
    bound = bind(plan, traced("llama-4"), BATCH)
    front, rear = (cost.chunks[0] for cost in stage_costs(bound, cluster))
    (leading, *_) = [one for segment in segments_by_stage(bound)[0] for one in segment.gathers]
    ends = [(front.forward, leading.there), (front.backward, leading.back)]
    if schedule == "1f1b":
        assert all(0.5 < one.uncovered / seconds_of(bucket, plan, cluster) < 1 for one, bucket in ends)
    else:
        assert (front.forward.uncovered, front.backward.uncovered) == (0, 0), "of every pass"
    (first, *rest) = [one for segment in segments_by_stage(bound)[1] for one in segment.gathers]
    there, back = seconds_of(first.there, plan, cluster), seconds_of(first.back, plan, cluster)
    (behind,) = [one.there for one in rest if one.uses[0][0] >= bound.blocks.stop]  # the head
    hidden = sum(seconds_of(one.there, plan, cluster) for one in rest)
    if schedule == "1f1b":
        assert rear.forward.uncovered == 0
        assert rear.backward.uncovered == pytest.approx(back)
        assert rear.forward.gathered == pytest.approx(there + hidden)
    else:
        assert (rear.forward.uncovered, rear.backward.uncovered) == (0, 0)
        assert rear.forward.gathered == pytest.approx(hidden)
        again = sum(seconds_of(one.there, plan, cluster) for one in (first, *rest) if one.again)
        again -= seconds_of(behind, plan, cluster)
        reduced = sum(seconds_of(one.back, plan, cluster) for one in rest)
        assert rear.backward.gathered == pytest.approx(again + reduced)


def seconds_of(bucket: Bucket, plan: Plan, cluster: Cluster) -> float:
    """Of its first message; what comes behind that is waited for."""
    (kind, axis), nbytes = bucket.moves[0], bucket.nbytes[0]
    return float(message_seconds(Message(kind=kind, axis=axis, nbytes=nbytes), plan.mesh, cluster))


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_what_comes_ahead_is_not_hidden_where_there_is_no_work(micro_batches: int) -> None:
    """On links that are much slower than the devices a pass takes what its messages take."""
    pinned = Pinned(data=4, zero=3, micro_batches=micro_batches, recompute="none")
    fast = with_quick_host(cluster_of("h100-80gb", 4))
    slow = replace(fast, levels=tuple(replace(level, bandwidth=level.bandwidth / 1e4) for level in fast.levels))
    update = Update(buckets="none", gathers="ahead")
    (found,) = search(request_of("llama-4", slow, 16, pinned=pinned, update=update)).plans[:1]
    time = dict(predict(bind(found.plan, traced("llama-4"), BATCH), slow).time)
    assert time["uncovered communication"] > 0.8 * -time["gathering under computation"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("zero", [1, 3])
def test_auto_takes_the_fastest_way_that_fits(zero: int) -> None:
    pinned = Pinned(data=4, zero=zero, micro_batches=2, recompute="full")
    cluster = cluster_of("h100-80gb", 4)

    def found(gathers: str, memory: float | None = None) -> Ranked:
        update = Update(buckets="none", gathers=gathers)
        result = search(request_of("llama-4", cluster, 16, pinned=pinned, update=update, memory_limit=memory))
        assert result.bound_seconds <= result.plans[0].objective * (1 + OPTIMAL)
        return result.plans[0]

    ways = [found(gathers) for gathers in GATHERS]
    fastest = min(ways, key=lambda way: way.seconds)
    assert found("auto").seconds <= fastest.seconds * (1 + OPTIMAL)


def test_auto_leaves_out_what_cannot_be() -> None:
    update = Update(buckets="none", gathers="auto")
    found = search(
        request_of("llama-4", with_own_network(cluster_of("cpu", 2)), 16, pinned=Pinned(interleave=2), update=update)
    ).plan
    assert (found.training.interleave, found.training.update.gathers) == (2, "each")


@pytest.mark.parametrize("gathers", ["block", "ahead"])
def test_other_software_gathers_as_it_does(gathers: str) -> None:
    """A share of its gathers is hidden by its profile: hidden once more, a plan would be faster than the fastest."""
    cluster = cluster_of("h100-80gb", 4).with_software(load_software("fsdp"))
    with refused(RequestError, "gathers", gathers, "fsdp", "pytorch"):
        search(request_of("llama-4", cluster, 16, update=Update(gathers=gathers)))


def test_copies_take_their_weights_one_by_one() -> None:
    with refused(RequestError, "gathers", "'block'", 2, "interleave"):
        request_of("llama-4", with_own_network(cluster_of("cpu", 2)), 16, pinned=Pinned(interleave=2), update=TOGETHER)


@pytest.mark.parametrize(("hardware", "precision"), [("h100-80gb", "bf16"), ("cpu", "fp32")])
def test_plans_that_gather_nothing_together_do_not_say_so(hardware: str, precision: str) -> None:
    """Whatever way found them, each weight is gathered by itself; their steps are the same by either way. Who asks for
    a way gets it, and where weights are sharded they come ahead, on CPUs, too."""

    def found(gathers: str, zero: int) -> Ranked:
        request = request_of("llama-4", cluster, 16, precision=precision, update=Update(gathers=gathers))
        return search(replace(request, pinned=Pinned(data=4, zero=zero, micro_batches=2))).plans[0]

    cluster = cluster_of(hardware, 4)
    whole, asked, sharded = found("auto", 0), found("ahead", 0), found("auto", 3)
    assert [one.plan.training.update.gathers for one in (whole, asked, sharded)] == ["each", "ahead", "ahead"]
    assert whole.seconds == asked.seconds


@pytest.mark.slow
def test_a_plan_that_gathers_nothing_together_says_so_only_where_it_fits_then() -> None:
    """Otherwise blocks are run one by one, which holds less, and takes as long."""
    cluster = machine_from("cpu", devices=2)
    pinned = {"pipeline": 2, "tensor": 1}
    free = planner.search("gpt-tiny", cluster, global_batch=8, pinned=pinned, simplicity=0.0)
    training, whole = free.plan.training, free.plan.prediction
    assert training.update.gathers == "each"
    one_by_one = replace(training, update=replace(training.update, gathers="ahead"))
    leaner = predict(replace(free.bound, plan=replace(free.plan, training=one_by_one)), cluster)
    assert leaner.step_seconds == whole.step_seconds
    assert leaner.peak_bytes < whole.peak_bytes
    between = (leaner.peak_bytes + whole.peak_bytes) / 2
    found = planner.search(
        "gpt-tiny", cluster, global_batch=8, pinned=pinned, simplicity=0.0, memory_limit=between
    ).plan.prediction
    assert found.peak_bytes <= between
    assert found.step_seconds == pytest.approx(whole.step_seconds, rel=1e-9)
