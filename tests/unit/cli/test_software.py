"""`--software`: plans priced for the stack that will run them."""

import json
from pathlib import Path
from typing import Any

import pytest

from planner.plan.file import load_plan

pytestmark = pytest.mark.usefixtures("searched_once")

TINY = ("--model", "llama-tiny", "--devices", "8", "--mode", "data_parallel")


@pytest.mark.cases(1)
@pytest.mark.parametrize("stack", ["megatron-2021", "nemo", "deepspeed-zero3"])
def test_a_plan_knows_its_stack(plan: Any, here: Path, stack: str) -> None:
    made = plan.json(*TINY, "--software", stack, "-o", "plan.json")
    assert made["software"] == load_plan(here / "plan.json").cluster.software == stack
    assert plan("verify", "plan.json").code == 0
    assert f"under {stack}" in " ".join(plan("show", "plan.json").out.split())
    again = plan.json("estimate", "plan.json", "-o", "again.json")
    assert (again["step_seconds"], again["software"]) == (made["step_seconds"], stack)
    assert load_plan(here / "again.json") == load_plan(here / "plan.json")


@pytest.mark.thorough
def test_a_plan_file_under_another_stack(plan: Any, here: Path) -> None:
    """The same choices at other prices, about which nothing is proved."""
    plan.json(*TINY, "-o", "plan.json")
    assert "software" not in json.loads((here / "plan.json").read_text())["cluster"]
    other = plan.json("estimate", "plan.json", "--software", "nemo", "-o", "other.json")
    assert other["step_seconds"] != other["step_seconds_in_file"]
    before, after = load_plan(here / "plan.json"), load_plan(here / "other.json")
    assert (after.groups, after.mesh, after.provenance.status) == (before.groups, before.mesh, "feasible")
    assert plan("verify", "other.json").code == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("stack", ["megatrn", ""])
def test_a_stack_that_nobody_knows_is_refused(plan: Any, here: Path, stack: str) -> None:
    words = f"no training stack '{stack}'"
    assert words in plan.refused(*TINY, "--software", stack)
    plan.json(*TINY, "--micro-batches", "1", "--recompute", "none", "-o", "plan.json")
    assert words in plan.refused("estimate", "plan.json", "--software", stack)
    content = json.loads((here / "plan.json").read_text())
    content["cluster"]["software"] = stack
    (here / "plan.json").write_text(json.dumps(content))
    assert f"plan.json: {words}" in plan.refused("verify", "plan.json")
