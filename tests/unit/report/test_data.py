"""What a page shows adds up to what the prediction says."""

import math
import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from planner.plan.compare.dissection import dissect
from planner.plan.prediction.timeline import RECEIVE, timeline_of
from planner.plan.prediction.walk.stage_cost import GATHERING, REDUCING
from planner.report.data import Choice, reasons_of
from planner.report.data.lanes import lanes_of
from planner.report.data.model import _Views
from planner.sharding.layout import format_layout
from tests.unit.plan.plans import verdict_of
from tests.unit.report.reports import reported, verdict_named
from tests.unit.search.cases import cluster_of

NAMES = ("one axis", "two axes", "pipeline", "several groups", "no blocks")


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", NAMES)
def test_operators_sum_to_the_parts_of_their_rank(name: str) -> None:
    bound = verdict_named(name).bound
    for rank in dissect(bound, cluster_of(bound.plan.cluster.profile, bound.plan.cluster.devices)):
        for part in ("forward", "backward", "recomputation", "communication", GATHERING, REDUCING):
            own = math.fsum(dict(one.seconds).get(part, 0.0) for one in rank.operators)
            assert own == pytest.approx(rank.cost.micro_batch[part], rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_the_timeline_ends_with_the_step(name: str) -> None:
    found = reported(name)
    assert found.timeline.seconds == pytest.approx(found.report.prediction.step_seconds)
    assert max(span.end for span in found.timeline.spans) == pytest.approx(found.timeline.seconds)
    assert all(0 <= span.start <= span.end for span in found.timeline.spans)


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_computes_one_thing_at_a_time(name: str) -> None:
    found = reported(name)
    for rank, use in enumerate(found.timeline.ranks):
        spans = sorted(s for s in found.timeline.spans if (s.rank, s.stream) == (rank, "computation"))
        assert all(after.start >= before.end - 1e-12 for before, after in pairwise(spans))
        assert math.fsum(span.end - span.start for span in spans) == pytest.approx(use.busy)
        assert use.busy + use.exposed + use.idle == pytest.approx(found.timeline.seconds)


def test_transfers_come_from_the_rank_that_made_them() -> None:
    """Of each micro-batch one forward to every rank but the first, one back to every rank but the last."""
    found, plan = reported("pipeline"), verdict_named("pipeline").bound.plan
    transfers = [span for span in found.timeline.spans if span.kind == RECEIVE]
    assert len(transfers) == 2 * (plan.pipeline - 1) * plan.training.micro_batches
    works = {(s.rank, s.end) for s in found.timeline.spans if s.stream == "computation"}
    for span in transfers:
        assert span.source == span.rank  # where it is sent, as receives are posted ahead
        assert any(rank == span.rank and end <= span.sent * (1 + 1e-12) for rank, end in works)
        assert span.sent <= span.start * (1 + 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_memory_over_the_step_reaches_the_peak(name: str) -> None:
    memory = reported(name).report.memory
    for curve in memory.curves:
        rank = memory.ranks[curve.rank]
        tensors = sum(nbytes for _, nbytes in rank.classes[:-1])
        assert max(curve.nbytes) == pytest.approx(tensors)
        assert curve.nbytes[-1] == pytest.approx(curve.nbytes[0])
        assert sum(nbytes for _, nbytes in rank.classes) == pytest.approx(rank.peak_bytes)


@pytest.mark.parametrize("name", NAMES)
def test_parts_are_those_of_the_prediction(name: str) -> None:
    report = reported(name).report
    spending = report.spending
    assert math.fsum(part.seconds for part in spending.parts) == pytest.approx(report.prediction.step_seconds)
    compute = math.fsum(one.total for one in spending.classes)
    assert compute <= report.prediction.step_seconds * (1 + 1e-9)
    told = dict(report.prediction.time)
    shown = {part.name: part.seconds for part in spending.parts}
    assert shown.get("gradient reduction", 0.0) == pytest.approx(
        told.get(REDUCING, 0.0) + told.get("gradient reduction", 0.0)
    )
    assert REDUCING not in shown
    for part in ("forward", "backward"):
        assert math.fsum(dict(one.seconds).get(part, 0.0) for one in spending.classes) == pytest.approx(told[part])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_sent_takes_what_the_prediction_says(name: str) -> None:
    """No software hides anything here. Moving within a device (a sum that is begun with zeros) is no message."""
    report = reported(name).report
    sent: defaultdict[str, float] = defaultdict(float)
    for one in report.network.crossings:
        sent[one.part] += one.seconds
    told = dict(report.prediction.time)
    for part in (GATHERING, REDUCING, "gradient reduction", "weight gathering", "stage transfer"):
        assert sent[part] == pytest.approx(told.get(part, 0.0), rel=1e-9, abs=1e-15)
    again = told.get("recomputation", 0.0)
    assert sent["communication"] <= told.get("communication", 0.0) * (1 + 1e-9)
    assert sent["recomputation"] <= again * (1 + 1e-9)


def test_every_level_has_its_axes() -> None:
    network = reported("by hand").report.network
    assert [(axis.name, axis.levels) for axis in network.axes] == [
        ("axis0", (("node", 2),)),
        ("axis1", (("node", 4),)),
    ]
    assert [(level.name, level.units) for level in network.levels] == [("node", 8), ("cluster", 1)]
    assert {one.level for one in network.crossings if one.along == "axis1"} == {"node"}


def test_every_block_has_a_stage_and_a_way() -> None:
    found, bound = reported("several groups").report.shape, verdict_named("several groups").bound
    assert [block.number for block in found.blocks] == list(range(bound.blocks.count))
    assert {block.stage for block in found.blocks} == {0, 1}
    variants = {variant.name: variant for variant in found.variants}
    for block in found.blocks:
        again = bound.recompute_of(block.number)
        assert (variants[block.variant].recomputation == "none") == (again is None)
    assert sum(variant.blocks for variant in found.variants) == bound.blocks.count


def test_what_blocks_keep_is_named_by_module_or_by_call() -> None:
    bound = verdict_named("several groups").bound
    group = next(group for group in bound.plan.groups if group.blocks)
    names = [name for name, _ in group.operators]
    product = next(name for name in names if "q_proj/" in name)
    own = next(name for name in names if re.search(r"\.\d+/add$", name))
    words = _Views(bound, {})._words("selective", replace(group, recomputation="selective", kept=(product, own)))
    assert words == "recomputed, keeping q_proj, add"


def test_operators_are_in_the_words_of_the_plan() -> None:
    found, bound = reported("by hand").report.shape, verdict_named("by hand").bound
    by_name = {one.operator.name: one for one in bound.operators}
    variant = next(variant for variant in found.variants if variant.name == "A")
    assert len(variant.operators) == len(bound.blocks.operators(0))
    for one in variant.operators:
        layouts = by_name[one.name].layouts
        assert one.results == tuple(format_layout(duplex.forward) for duplex in layouts.results)
    assert {one.splits for one in variant.operators if one.short == "mlp.down_proj"} == {("batch", "in")}


def test_few_bars_stand_for_many() -> None:
    timeline = reported("pipeline").timeline
    whole, few = lanes_of(timeline), lanes_of(timeline, at_most=30)
    assert (whole.window, sum(len(lane.bars) for lane in whole.lanes)) == (0.0, len(timeline.spans))
    bars = [bar for lane in few.lanes for bar in lane.bars]
    assert few.window > 0
    assert len(bars) < len(timeline.spans)
    assert sum(bar.count for bar in bars) == len(timeline.spans)
    busy = math.fsum(span.end - span.start for span in timeline.spans)
    assert math.fsum(bar.busy for bar in bars) == pytest.approx(busy)


def test_trust_says_what_it_rests_on() -> None:
    known, unknown = reported("two axes").report.trust, reported("one axis").report.trust
    assert (known.machines, known.experts, known.runs > 50) == ("hopper", False, True)
    assert known.low_seconds is not None
    assert known.high_seconds is not None
    assert known.low_seconds < known.step_seconds < known.high_seconds
    assert known.fits
    assert known.measured is not None
    assert (unknown.machines, unknown.runs) == ("other", 0)
    assert sum(count for _, count in known.facts) > 0


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1", "pipedream"])
def test_other_schedules_are_drawn_too(schedule: str) -> None:
    """As long as the step that is predicted; without a flush the first step, which fills the pipeline, is longer."""
    verdict = verdict_named("several groups")
    plan = replace(verdict.bound.plan, schedule=schedule)
    found = verdict_of(plan)
    cluster = cluster_of(plan.cluster.profile, plan.cluster.devices)
    drawn = timeline_of(plan, [rank.cost for rank in dissect(found.bound, cluster)])
    if schedule == "pipedream":
        assert drawn.seconds > found.prediction.step_seconds
    else:
        assert drawn.seconds == pytest.approx(found.prediction.step_seconds)


def choice(seconds: float, **words: str) -> Choice:
    return Choice(step_seconds=seconds, peak_bytes=1.0, words=tuple(words.items()))


def test_reasons_are_the_dearest_decisions_each_with_its_next_best() -> None:
    own = choice(1.0, degrees="a", ZeRO="3", recomputation="none")
    others = [
        choice(1.2, degrees="b", ZeRO="3", recomputation="none"),
        choice(1.1, degrees="b", ZeRO="3", recomputation="full"),
        choice(1.5, degrees="a", ZeRO="1", recomputation="none"),
    ]
    found = reasons_of(own, others, [("ZeRO", "2"), ("ZeRO", "0"), ("recomputation", "selective")])
    assert [(one.decision, one.instead, one.step_seconds) for one in found] == [
        ("recomputation", "selective does not fit with these degrees", None),  # the next best is that of degrees
        ("ZeRO", "0 or 2 do not fit with these degrees; 1", 1.5),
        ("degrees", "b (then recomputation full)", 1.1),
    ]
    assert reasons_of(own, [own]) == ()


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_is_on_one_host(name: str) -> None:
    found, bound = reported(name).report.hosts, verdict_named(name).bound
    ranks = [rank for host in found.hosts for rank in host.ranks]
    assert [rank.number for rank in ranks] == list(range(bound.plan.cluster.devices))
    size = bound.plan.mesh.size
    assert {rank.stage for rank in ranks} == set(range(bound.plan.pipeline))
    for rank in ranks:
        strides = [axis.stride for axis in bound.plan.mesh.axes]
        assert sum(place * stride for place, stride in zip(rank.places, strides, strict=True)) == rank.number % size
