"""`--cluster`: nodes and networks from the command line, and plans that know the machine they are for."""

import json
from pathlib import Path
from typing import Any

import pytest

from hardware_profiles import compose
from planner import search
from planner.plan.file import load_plan
from tests.refusals import says

pytestmark = pytest.mark.usefixtures("searched_once")

TINY = ("--model", "llama-tiny", "--hardware", "h100-80gb", "--devices", "8", "--mode", "data_parallel")
LEVELS = "node=2,rack=2@50,cluster=4@25/2"
WRITTEN = "node=2@450,rack=2@50,cluster=4@25/2"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_slower_networks_cost_more(plan: Any) -> None:
    def step(*levels: str) -> float:
        return float(plan.json("estimate", *TINY, *levels)["step_seconds"])

    one_node, racks, slow = step(), step("--cluster", LEVELS), step("--cluster", "node=2,cluster@0.5")
    assert one_node < racks < slow
    assert step("--cluster", "node,cluster") == one_node


@pytest.mark.slow
def test_a_plan_knows_its_machine(plan: Any, here: Path) -> None:
    made = plan.json(*TINY, "--cluster", LEVELS, "--micro-batches", "1", "--recompute", "none", "-o", "plan.json")
    assert (made["hardware"], made["cluster"]) == ("h100-80gb", WRITTEN)
    cluster = load_plan(here / "plan.json").cluster
    assert (cluster.composition, cluster.digest) == (WRITTEN, compose("h100-80gb", LEVELS).digest())
    assert plan("verify", "plan.json").code == 0
    assert f"8 x h100-80gb as {WRITTEN}" in " ".join(plan("show", "plan.json").out.split())
    again = plan.json("estimate", "plan.json", "-o", "again.json")
    assert (again["step_seconds"], again["cluster"]) == (made["step_seconds"], WRITTEN)
    assert load_plan(here / "again.json") == load_plan(here / "plan.json")


@pytest.mark.thorough
@pytest.mark.slow
def test_a_plan_file_on_other_networks(plan: Any, here: Path) -> None:
    """--cluster replaces the levels that the plan was made for; --hardware keeps them for the same profile, and is any
    other one as it is."""
    made = plan.json(*TINY, "--cluster", LEVELS, "-o", "plan.json")
    same = plan.json("estimate", "plan.json", "--hardware", "h100-80gb")
    assert (same["cluster"], same["step_seconds"]) == (made["cluster"], made["step_seconds"])
    assert plan.json("estimate", "plan.json", "--hardware", "h200-141gb")["cluster"] is None
    slow = plan.json("estimate", "plan.json", "--cluster", "node=2,cluster@1", "-o", "slow.json")
    assert made["step_seconds"] < slow["step_seconds"]
    assert plan("verify", "slow.json").code == 0


@pytest.mark.thorough
@pytest.mark.slow
def test_plans_for_plain_profiles_say_nothing_of_levels(plan: Any, here: Path) -> None:
    assert plan.json(*TINY, "-o", "plan.json")["cluster"] is None
    assert "composition" not in json.loads((here / "plan.json").read_text())["cluster"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_search_takes_what_was_composed() -> None:
    found = search("llama-tiny", compose("h100-80gb", LEVELS), devices=8, seq_len=64)
    assert found.plan.cluster.composition == WRITTEN


def test_nodes_of_another_size_are_said_to_be_possible(plan: Any) -> None:
    refusal = plan.refused("--model", "llama-tiny", "--hardware", "h100-80gb", "--devices", "12")
    says(refusal, 12, 8, 16, "--cluster", "node=6,cluster")
    assert "--cluster" not in plan.refused("--model", "llama-tiny", "--hardware", "h100-80gb", "--devices", "13")


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        ("node=8;cluster", "--cluster 'node=8;cluster': 'node=8;cluster' is not a level; write NAME=COUNT@GB_PER_S"),
        ("nodes=8,cluster", "did you mean node?"),
        ("node=1,cluster", "leave it out"),
        ("node,rack,cluster", "say it, as in rack=4"),
        ("node=3,cluster", "8 devices do not fill whole nodes of 3 devices"),
        ("node=4", "holds at most 4 devices, got 8"),
    ],
)
def test_levels_that_cannot_be_are_refused(plan: Any, levels: str, words: str) -> None:
    assert words in plan.refused(*TINY, "--cluster", levels)
    assert words in plan.refused("estimate", *TINY, "--cluster", levels)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_composition_that_was_edited_is_judged(plan: Any, here: Path) -> None:
    plan.json(*TINY, "--cluster", LEVELS, "-o", "plan.json")
    content = json.loads((here / "plan.json").read_text())
    content["cluster"]["composition"] = "node=2,rack,cluster"
    (here / "plan.json").write_text(json.dumps(content))
    assert "plan.json: cluster.composition 'node=2,rack,cluster': level rack" in plan.refused("verify", "plan.json")
    content["cluster"]["composition"] = "node=2@450,rack=2@50,cluster=4@25"
    (here / "plan.json").write_text(json.dumps(content))
    assert "plan again for this profile" in plan.refused("verify", "plan.json")
