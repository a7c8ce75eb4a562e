"""Several kinds of devices on the command line: planned, shown, verified, priced again, or refused."""

from pathlib import Path
from typing import Any

import pytest

import hardware_profiles

JOB = ("--model", "llama-tiny", "--pipeline", "2", "--global-batch", "16")
TWO = "h100-80gb:2,a100-80gb:2,between@12.5"


def test_every_answer_says_the_group_of_each_stage(plan: Any, here: Path) -> None:
    made = plan.json(*JOB, "--hardware", TWO, "-o", "plan.json")
    assert made["devices"] == sum(run["devices"] for run in made["groups"]) == 4
    assert {run["group"] for run in made["groups"]} == {"h100-80gb", "a100-80gb"}
    held = {run["group"]: run["blocks"][0] for run in made["groups"]}
    shown = plan("show", "plan.json").out
    for number, run in enumerate(made["groups"]):
        assert (
            f"stage {number} on {run['group']}, ranks {2 * number} to {2 * number + 1}: {held[run['group']]}" in shown
        )
    assert plan("verify", "plan.json").code == 0
    assert plan.json("estimate", "plan.json")["step_seconds"] == made["step_seconds"]
    alike = plan.json("estimate", "plan.json", "--hardware", "h100-80gb")
    assert alike["groups"] is None
    assert alike["step_seconds"] < made["step_seconds"]
    text = (here / "plan.json").read_text()
    (here / "edited.json").write_text(text.replace('"group": "a100-80gb"', '"group": "h100-80gb"'))
    assert ".group is 'h100-80gb'; by cluster.profile" in plan.refused("verify", "edited.json")
    for command in (
        ("report", "plan.json"),
        ("explain", "plan.json"),
        ("export", "plan.json", "--to", "megatron", "-o", "out"),
    ):
        assert "several kinds of devices" in plan.refused(*command)


def test_estimates_take_the_fewest_stages(plan: Any) -> None:
    found = plan.json("estimate", "--model", "llama-tiny", "--global-batch", "16", "--hardware", TWO)
    assert (found["degrees"]["pipeline"], found["degrees"]["data"]) == (2, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--hardware", TWO, "--devices", "8"), "has 4 devices, asked for 8"),
        (("--hardware", TWO, "--cluster", "node=8"), "each has levels of its own; write them in brackets"),
        (("--hardware", TWO, "--pipeline", "1"), "every stage lies within one group"),
        (("--hardware", TWO, "--objective", "cost"), "only time is searched there"),
        (("--hardware", TWO, "--search", "recursive_programming"), "take dynamic_programming or ilp"),
        (("--hardware", TWO, "--virtual-stages", "2"), "virtual stages hold equal blocks on every device"),
        (("--hardware", TWO, "--offload", "optimizer"), "nothing is parked there"),
        (("--hardware", "h100-80gb:2,a100-80gb"), "'a100-80gb' is not a group of devices"),
    ],
)
def test_what_there_is_not_is_refused_in_one_line(plan: Any, arguments: tuple[str, ...], words: str) -> None:
    assert words in plan.refused("--model", "llama-tiny", "--global-batch", "16", *arguments)


def test_a_profile_of_its_own_keeps_the_levels_of_a_plan(plan: Any, here: Path) -> None:
    """Its file says what the devices are, the plan how they are connected."""
    packaged = Path(hardware_profiles.__file__).with_name("cpu.toml")
    (here / "own.toml").write_text(packaged.read_text())
    made = plan.json(
        "--model", "llama-tiny", "--devices", "4", "--hardware", "cpu", "--cluster", "machine=4@1", "-o", "plan.json"
    )
    again = plan.json("estimate", "plan.json", "--hardware", "own.toml")
    assert again["cluster"] == made["cluster"] == "machine=4@1"
    assert again["step_seconds"] == made["step_seconds"]
