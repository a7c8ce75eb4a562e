"""Where a report shows stages and what they send, when pipeline ranks hold several."""

import math
from dataclasses import replace

import pytest

from hardware_profiles import load_profile, with_network
from planner.plan.binding.bind import BoundPlan, bind
from planner.plan.compare.dissection import dissect
from planner.report.data.model import AFTER, model_of
from planner.report.data.network import network_of
from planner.report.html.model import model_view
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
