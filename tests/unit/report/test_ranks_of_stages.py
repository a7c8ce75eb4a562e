"""Where a report shows stages and what they send, when pipeline ranks hold several."""

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hardware_profiles import clusters_of_ranks, load_machine, load_profile, with_network
from planner.api.measured import compare_measured
from planner.plan.binding.bind import BoundPlan, bind
from planner.plan.binding.machine import cluster_reference
from planner.plan.compare.dissection import dissect
from planner.plan.compare.explanation import explain
from planner.plan.compare.measured import predicted_peak
from planner.plan.layout.group_runs import group_runs
from planner.plan.layout.roles import roles
from planner.plan.plan import Plan, StagePrediction
from planner.plan.prediction.predict import predict
from planner.report.data import report_of
from planner.report.data.model import AFTER, model_of
from planner.report.data.network import network_of
from planner.report.html import page
from planner.report.html.model import model_view
from planner.report.terminal import print_plan
from tests.distributed import plans

MACHINE = with_network(load_profile("h100-80gb"), bandwidth={}, devices_per_node=4).with_devices(8)
"""Nodes of two pipeline ranks with two devices each."""


def bound_of(schedule: str, stages: tuple[int, ...], micro_batches: int) -> BoundPlan:
    """Ranks of two stages, on two devices each."""
    plan = plans.hand_plan(
        "zero1",
        "gpt4",
        plans.mesh_of(2),
        stages=stages,
        micro_batches=micro_batches,
        global_batch=plans.BATCH * micro_batches,
    )
    cluster = replace(plan.cluster, devices=len(stages))
    plan = replace(plan, virtual_stages=2, schedule=schedule, cluster=cluster)
    return bind(plan, plans.traced("gpt4"), plans.BATCH)


@pytest.mark.parametrize(
    ("schedule", "stages", "levels"),
    [
        ("interleaved_1f1b", (0, 1, 1, 1, 1, 0), [{"node", "cluster"}, {"node"}, {"node", "cluster"}]),
        ("zb_v", (1, 1, 1, 1), [{"node"}, {"node"}]),
    ],
)
def test_transfers_take_the_links_by_which_they_are_priced(
    schedule: str, stages: tuple[int, ...], levels: list[set[str]]
) -> None:
    """From the last rank back to the first one, too, and in a V from the next rank."""
    bound = bound_of(schedule, stages, 3)
    for number, rank in enumerate(dissect(bound, MACHINE)):
        found = network_of(bound, rank, number, MACHINE).crossings
        sent = [one for one in found if one.part == "stage transfer"]
        assert {one.level for one in sent} == levels[number]
        assert math.fsum(one.seconds for one in sent) == pytest.approx(3 * rank.cost.micro_batch["stage transfer"])


@pytest.mark.parametrize(
    ("schedule", "last"), [("interleaved_1f1b", 1), ("zb_v", 0)]
)  # a V ends on the rank where it began
def test_what_follows_the_blocks_is_on_the_rank_of_the_last_stage(schedule: str, last: int) -> None:
    bound = bound_of(schedule, (1, 1, 1, 1), 2)
    view = model_view(model_of(bound, dissect(bound, MACHINE)))
    assert [row.name for row in view.rows if row.cells[-1].text == "after"] == [f"stage {last}"]
    (places,) = (row[3] for row in view.table.rows if row[0] == AFTER)
    assert places == str(last)


MIXED = load_machine("h100-80gb:2,a100-80gb:2")
"""A pipeline rank on each kind, with two devices each; an A100 reserves more memory than an H100."""


def mixed_plan(schedule: str, stages: tuple[int, ...]) -> Plan:
    plan = plans.hand_plan(
        "zero1", "gpt4", plans.mesh_of(2), stages=stages, micro_batches=2, virtual_stages=len(stages) // 2,
        schedule=schedule,
    )  # fmt: skip
    kinds = clusters_of_ranks(MIXED, plan.pipeline)
    held = (replace(stage, group=kinds[plan.rank_of(at)].name) for at, stage in enumerate(plan.stages))
    plan = replace(plan, cluster=cluster_reference(MIXED), stages=tuple(held))
    bound = bind(plan, plans.traced("gpt4"), plans.BATCH)
    return replace(plan, prediction=predict(bound, MIXED))


@pytest.mark.parametrize(
    ("schedule", "stages", "blocks"),
    [("1f1b", (3, 1), (3, 1)), ("interleaved_1f1b", (2, 1, 1, 0), (3, 1)), ("zb_v", (1, 1, 1, 1), (2, 2))],
)
def test_kinds_of_devices_are_those_of_pipeline_ranks(
    schedule: str, stages: tuple[int, ...], blocks: tuple[int, int]
) -> None:
    plan = mixed_plan(schedule, stages)
    found = group_runs(plan)
    assert [(run.group, run.first_stage, run.first_device, run.devices, run.blocks) for run in found] == [
        ("h100-80gb", 0, 0, 2, (blocks[0],)),
        ("a100-80gb", 1, 2, 2, (blocks[1],)),
    ]
    assert [run.peaks(plan.prediction) for run in found] == [(one.peak_bytes,) for one in plan.prediction.stages]


def test_a_logged_peak_is_compared_with_the_fullest_kind_of_device(tmp_path: Path) -> None:
    plan = mixed_plan("1f1b", (1, 3))
    assert group_runs(plan)[1].peaks(plan.prediction) == (plan.prediction.peak_bytes,)
    line = (
        "iteration {0}/ 9 | elapsed time per iteration (ms): 9.0 | global batch size: 4 |\n[Rank 0] (after {0}"
        " iterations) memory (MB) | allocated: 9.0 | max allocated: 90.0 |\n"
    )
    log = tmp_path / "train.log"
    log.write_text("".join(line.format(at) for at in range(1, 6)), encoding="utf-8")
    found = compare_measured(plan, log=log, engine="megatron").compared
    assert found.peak_kind == "allocated"
    assert found.predicted_peak_bytes == pytest.approx(predicted_peak(plan.prediction, "cuda"))


def test_seconds_of_stages_and_blocks_are_those_of_a_slice() -> None:
    plan = plans.hand_plan(
        "zero1", "gpt4", plans.mesh_of(2), stages=(2, 2), micro_batches=2, schedule="seqpipe", slices=2
    )
    bound = bind(plan, plans.traced("gpt4"), plans.BATCH)
    prediction, machine = predict(bound, MACHINE), MACHINE.with_devices(4)
    report = report_of(bound, prediction, machine).report
    console = Console(file=io.StringIO(), width=200)
    print_plan(console, bound, roles(bound), prediction)
    assert isinstance(console.file, io.StringIO)
    for text in (page(report), console.file.getvalue()):
        assert "per slice" in text
        assert "per micro-batch" not in text
    whole = 2 * 2 * prediction.stages[0].micro_batch_seconds + prediction.stages[0].once_seconds
    assert 0.5 < whole / prediction.step_seconds < 1.1


def test_what_limits_a_plan_is_told_by_all_slices_and_by_shares_of_devices() -> None:
    own = mixed_plan("1f1b", (1, 3)).prediction
    slow = StagePrediction(micro_batch_seconds=1.0, once_seconds=0.0, peak_bytes=9.0)
    full = StagePrediction(micro_batch_seconds=0.9, once_seconds=0.3, peak_bytes=8.0)  # of a smaller device
    prediction = replace(own, stages=(slow, full), peak_bytes=8.0)
    slowest = {
        turns: explain(prediction, turns=turns, capacity=10.0, memory_price=0.0, next_best=None).slowest
        for turns in (2, 4)
    }
    assert slowest == {2: 1, 4: 0}
    assert explain(prediction, turns=2, capacity=10.0, memory_price=0.0, next_best=None).fullest == 1
