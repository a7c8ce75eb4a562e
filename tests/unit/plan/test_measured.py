"""A prediction beside a run of it: terms sum to the step, and a record of another plan is none of it."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hardware_profiles import MeasurementsError
from hardware_profiles.run_record import (
    TERMS,
    MeasuredRun,
    RankTerms,
    RunMachine,
    dump_run_record,
    load_run_record,
    parse_run_record,
)
from planner.errors import RequestError
from planner.plan.compare import measured
from planner.plan.compare.measured import compare_run, predicted_terms, run_plan
from planner.plan.file import load_plan, plan_content
from planner.plan.plan import SLACK, Plan
from planner.plan.prediction.step import AHEAD, BESIDE, COVERED, GATHERED_AHEAD, REDUCED_AHEAD, UNCOVERED
from planner.plan.schema import PlanFile, TrainingSection
from tests.refusals import refused

PLAN = Path(__file__).resolve().parents[2] / "distributed" / "llama-tiny-in-two.json"


def plan() -> Plan:
    return load_plan(PLAN)


def rank(stage: int = 0, **seconds: float) -> RankTerms:
    return RankTerms(
        stage=stage,
        seconds={name: seconds.get(name, 0.0) for name in TERMS},
        cpu_seconds={"forward": 0.05, "backward": 0.1, "update": 0.01},
        peak_bytes=5e8,
        memory={"weights": 1e7, "gradients": 1e7, "optimizer state": 5e6},
    )


def run(*ranks: RankTerms) -> MeasuredRun:
    return MeasuredRun(
        kind="measured run",
        schema_version=2,
        date="2026-01-01",
        plan=run_plan(plan()),
        machine=RunMachine(name="a processor", device_type="cpu", torch="2.9", threads=1),
        step_seconds=(0.2,) * 4,
        profiled_seconds=None,
        ranks=ranks,
        operators={"matmul": 0.1},
        collectives=(),
        peak_kind="resident",
    )


def test_terms_sum_to_the_step_on_both_sides() -> None:
    said = predicted_terms(plan().prediction)
    assert sum(said.values()) == pytest.approx(plan().prediction.step_seconds)
    found = compare_run(plan(), run(rank(forward=0.06, backward=0.1, communication=0.01, rest=0.03)))
    assert found.measured_seconds == pytest.approx(0.2)
    assert sum(one.share for one in found.terms) == pytest.approx(found.error)
    assert found.inside
    assert [one.name for one in found.wrong] == ["rest", "reduction", "forward", "communication"]
    assert {one.name: one.measured for one in found.memory}["weights"] == 1e7


def test_a_peak_of_tensors_is_compared_with_that_of_tensors() -> None:
    """On accelerators a record has what tensors take: no slack of the allocator, and nothing that a device reserves."""
    prediction = plan().prediction
    slack = dict(prediction.memory)[SLACK]
    assert slack > 0
    on_cpu = run(rank())
    on_gpu = replace(on_cpu, machine=replace(on_cpu.machine, device_type="cuda"), peak_kind="allocated")
    shifted = replace(plan(), prediction=replace(prediction, offloaded=(("host", 5.0),)))
    assert compare_run(shifted, on_cpu).predicted_peak_bytes == prediction.peak_bytes + 5.0
    assert compare_run(shifted, on_gpu).predicted_peak_bytes == prediction.peak_bytes - slack


def test_memory_is_that_of_the_stage_that_is_predicted_to_be_fullest() -> None:
    """The fullest by its peak keeps the most activations; another stage may keep more weights."""
    prediction = plan().prediction
    (stage,) = prediction.stages
    stages = (stage, replace(stage, peak_bytes=stage.peak_bytes / 2))
    piped = replace(plan(), prediction=replace(prediction, stages=stages))
    more = replace(rank(1), memory={"weights": 9e7, "gradients": 9e7, "optimizer state": 9e7})
    found = compare_run(piped, run(rank(), more))
    assert {one.name: one.measured for one in found.memory}["weights"] == 1e7


def test_the_stage_that_is_busy_longest_counts_in_the_mean_of_its_ranks() -> None:
    ranks = (rank(forward=0.1, transfer=0.1), rank(1, forward=0.14, rest=0.06), rank(1, forward=0.16, rest=0.04))
    found = {one.name: one.measured for one in compare_run(plan(), run(*ranks)).terms}
    assert found["forward"] == pytest.approx(0.15)
    assert found["rest"] == pytest.approx(0.05)
    clock = compare_run(plan(), run(*ranks), "cpu")
    assert {one.name: one.measured for one in clock.terms}["forward"] == 0.05


def test_by_cpu_seconds_waiting_is_for_the_rank_that_computes_most() -> None:
    busier = replace(rank(waiting=0.01), cpu_seconds={"forward": 0.09, "backward": 0.1, "update": 0.01})
    ranks = run(rank(waiting=0.05), busier)
    assert {one.name: one.measured for one in compare_run(plan(), ranks).terms}["waiting"] == pytest.approx(0.03)
    by_cpu = {one.name: one.measured for one in compare_run(plan(), ranks, "cpu").terms}
    assert by_cpu["waiting"] == pytest.approx(0.02)
    assert by_cpu["forward"] == pytest.approx(0.07)


def test_communication_that_other_micro_batches_cover_is_predicted_to_take_no_time() -> None:
    prediction = replace(plan().prediction, time=(("communication", 0.03), (COVERED, -0.02), ("forward", 0.1)))
    assert predicted_terms(prediction)["communication"] == pytest.approx(0.01)
    assert predicted_terms(prediction)["rest"] == 0.0


@pytest.mark.parametrize(
    ("part", "term"), [(REDUCED_AHEAD, "reduction"), (GATHERED_AHEAD, "communication"), (BESIDE, "rest")]
)
def test_what_is_not_covered_is_of_what_travels(part: str, term: str) -> None:
    """Weights that visit from the host are of no network, and were once said to be communication."""
    time = (("forward", 0.1), ("backward", 0.2), ("gradient reduction", 0.05), (part, -0.03), (UNCOVERED, 0.01))
    found = predicted_terms(replace(plan().prediction, time=time))
    without = predicted_terms(replace(plan().prediction, time=time[:-1]))
    assert found[term] - without[term] == pytest.approx(0.01)
    assert sum(found.values()) == pytest.approx(0.33)
    assert (found["forward"], found["backward"]) == (0.1, 0.2)


def test_launches_ahead_shorten_the_passes() -> None:
    found = predicted_terms(replace(plan().prediction, time=(("forward", 0.1), ("backward", 0.3), (AHEAD, -0.04))))
    assert (found["forward"], found["backward"]) == (pytest.approx(0.09), pytest.approx(0.27))


def test_a_run_of_another_plan_is_refused() -> None:
    other = replace(run(rank()), plan=replace(run_plan(plan()), mesh=(4, 2)))
    with refused(RequestError, "mesh", "4x2"):
        compare_run(plan(), other)


def edited(content: dict[str, Any], **changes: object) -> list[object]:
    """The ranks of a record, the first of which says something else."""
    first, *others = content["ranks"]
    return [{**first, **changes}, *others]


def test_a_run_of_a_plan_with_the_same_degrees_that_splits_otherwise_is_refused() -> None:
    """A mesh of two may split samples or tensors: degrees alone do not tell plans apart."""
    known = plan()
    group = known.groups[-1]
    changed = replace(group, recomputation="full" if group.recomputation == "none" else "none")
    for other, part in (
        (replace(known, groups=(*known.groups[:-1], changed)), "recomputation"),
        (replace(known, schedule="gpipe"), "schedule"),
        (replace(known, training=replace(known.training, tokens_once=True)), "training"),
    ):
        with refused(RequestError, "another plan", part):
            compare_run(other, run(rank()))


def test_a_run_of_the_same_choices_on_another_machine_or_in_an_older_record_is_compared() -> None:
    known, took = plan(), rank(forward=0.2)
    elsewhere = replace(known, cluster=replace(known.cluster, profile="mine", digest="0" * 64))
    older = replace(run(took), plan=replace(run_plan(known), choices={}))
    for one, record in ((elsewhere, run(took)), (known, older)):
        assert compare_run(one, record).measured_seconds == pytest.approx(0.2)


def test_a_setting_that_a_later_version_adds_is_in_no_record_of_a_plan_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Training(TrainingSection):
        later: bool = False

    class File(PlanFile):
        training: Training

    def with_later(one: Plan) -> dict[str, Any]:
        content = plan_content(one)
        return {**content, "training": {**content["training"], "later": one.training.interleave > 1}}

    record, known = run(rank(forward=0.2)), plan()
    other = replace(known, training=replace(known.training, interleave=2))
    monkeypatch.setattr(measured, "PlanFile", File)
    monkeypatch.setattr(measured, "plan_content", with_later)
    assert compare_run(known, record).measured_seconds == pytest.approx(0.2)
    with refused(RequestError, "another plan", "training settings"):
        compare_run(other, record)


def test_a_record_with_digests_of_what_a_plan_file_says_is_compared() -> None:
    """As records were written before defaults were left out of them."""
    known, record = plan(), run(rank(forward=0.2))
    sections = {
        "training settings": ("training",),
        "schedule": ("schedule", "virtual_stages", "slices"),
        "layouts of inputs": ("inputs",),
        "sharding, recomputation or ZeRO of its blocks": ("groups", "rules"),
    }
    texts = {words: json.dumps([plan_content(known).get(key) for key in keys]) for words, keys in sections.items()}
    written = {words: hashlib.sha256(text.encode()).hexdigest()[:16] for words, text in texts.items()}
    assert written["training settings"] != record.plan.choices["training settings"]
    older = replace(record, plan=replace(record.plan, choices=written))
    assert compare_run(known, older).measured_seconds == pytest.approx(0.2)
    changed = replace(known, training=replace(known.training, interleave=2))
    with refused(RequestError, "another plan", "training settings"):
        compare_run(changed, older)


def test_an_older_record_of_the_same_machine_says_what_its_plan_was_predicted_to_take() -> None:
    known, ran = plan(), run_plan(plan())
    longer = {**ran.predicted, "update": ran.predicted["update"] + 0.01}
    other = replace(run(rank(forward=0.2)), plan=replace(ran, choices={}, predicted=longer))
    with refused(RequestError, "another plan", "step"):
        compare_run(known, other)
    moved = replace(other, plan=replace(other.plan, profile_digest="0" * 64))
    assert compare_run(known, moved).measured_seconds == pytest.approx(0.2)


def test_a_plan_file_whose_step_was_edited_is_not_compared() -> None:
    known = plan()
    with refused(RequestError, 99, "plan verify"):
        compare_run(replace(known, prediction=replace(known.prediction, step_seconds=99.0)), run(rank(forward=0.2)))
    huge = replace(known.prediction, time=(("forward", 1.7e308), ("backward", 1.7e308)))
    with refused(RequestError, "inf", "plan verify"):
        compare_run(replace(known, prediction=huge), run(rank(forward=0.2)))


def test_a_peak_that_was_not_counted_is_unknown() -> None:
    assert compare_run(plan(), run(replace(rank(forward=0.2), peak_bytes=0.0))).measured_peak_bytes is None


def test_a_record_reads_back_and_what_is_none_is_named(tmp_path: Path) -> None:
    record = run(*[rank(forward=0.1)] * 4)
    path = tmp_path / "run.json"
    path.write_text(dump_run_record(record), encoding="utf-8")
    assert load_run_record(path) == record
    with refused(MeasurementsError, str(PLAN), "measured run"):
        load_run_record(PLAN)
    content = json.loads(dump_run_record(record))
    for change, place in (
        ({"extra": 1}, "extra"),
        ({"step_seconds": []}, "step_seconds"),
        ({"schema_version": 3}, "schema_version"),
        ({"schema_version": 1}, "measure the plan again"),
        ({"ranks": [{**content["ranks"][0], "seconds": {"forward": 1.0}}]}, "ranks.0.seconds"),
        ({"machine": {**content["machine"], "name": "a\x1b[31m"}}, "machine.name"),
        ({"date": "a\nb"}, "date"),
        ({"machine": {**content["machine"], "name": 300 * "a"}}, "machine.name"),
        ({"ranks": content["ranks"][:3]}, "it has 3, and plan.devices is 4"),
        ({"ranks": edited(content, stage=1)}, "ranks.0.stage"),
        ({"ranks": edited(content, seconds={**dict.fromkeys(TERMS, 0.1), "update": -1.0})}, "ranks.0.seconds.update"),
        ({"ranks": edited(content, seconds=dict.fromkeys(TERMS, 0.0))}, "they make no step"),
    ):
        with refused(MeasurementsError, place):
            parse_run_record(json.dumps({**content, **change}))
