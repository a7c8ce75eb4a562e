"""Dense parameter servers: where they are not, commands say so, and what to do."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import hardware_profiles

pytestmark = pytest.mark.usefixtures("searched_once")

USUAL = ("--model", "llama-tiny", "--hardware", "cpu", "--devices", "4")
SERVERS = ("--zero-by", "servers")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--mode", "parameter_server", "--offload", "weights"), "leave weights out of offload"),
        (("--mode", "parameter_server", "--devices", "1"), "data parallelism of 2 or more"),
        ((*SERVERS, "--tensor", "4"), "tensor = 4 x pipeline = 1 use; take data parallelism of 2 or more"),
        ((*SERVERS, "--optimizer", "lamb"), "summed between devices, and servers update on hosts"),
        ((*SERVERS, "--software", "megatron"), "set software to pytorch"),
    ],
)
def test_what_servers_cannot_do_is_refused(plan: Any, options: tuple[str, ...], words: str) -> None:
    assert words in plan.refused(*USUAL, *options)


def test_a_plan_is_refused_on_machines_without_servers(plan: Any, here: Path) -> None:
    profile = (Path(hardware_profiles.__file__).parent / "cpu.toml").read_text()
    (here / "nohost.toml").write_text(re.sub(r"(?ms)^\[host.*?(?=^\[(?!host)|\Z)", "", profile))
    plan(*USUAL, "--mode", "parameter_server", "-o", "served.json")
    assert "add a section [host]" in plan.refused("estimate", "served.json", "--hardware", "nohost.toml")
    assert "set software to pytorch" in plan.refused("estimate", "served.json", "--software", "megatron")
    mixed = ("--hardware", "h100-80gb:2,a100-80gb:2", "--devices", "4")
    assert "several kinds of devices" in plan.refused("--model", "llama-tiny", *mixed, *SERVERS)


@pytest.mark.cases(1)
@pytest.mark.parametrize("owners", ["servers", "parameters"])
def test_estimates_take_the_stage_of_owners(plan: Any, owners: str) -> None:
    assert plan.json("estimate", *USUAL, "--zero-by", owners)["update"]["zero_by"] == owners


@pytest.mark.thorough
def test_an_export_says_that_servers_were_given_up(plan: Any, here: Path) -> None:
    plan(*USUAL, "--mode", "parameter_server", "-o", "served.json")
    said = " ".join(plan("export", "served.json", "--to", "torchtitan", "-o", "out").out.split())
    assert "has no parameter servers for dense weights, which was given up; the best that it has" in said
    assert (
        "no parameter servers for dense weights: these are the settings of another plan"
        in (here / "out" / "README.md").read_text()
    )


def test_a_file_whose_servers_have_nothing_is_refused(plan: Any, here: Path) -> None:
    plan(*USUAL, "--mode", "parameter_server", "-o", "served.json")
    content = json.loads((here / "served.json").read_text())
    stored = [one for group in content["groups"] for one in group["parameters"].values()]
    for one in stored:
        one["state"] = "S0"
    (here / "edited.json").write_text(json.dumps(content))
    assert "'servers' applies to no parameter" in plan.refused("verify", "edited.json")
    assert "parameter servers" not in plan("show", "edited.json").out
    for one in stored:
        one |= {"state": "R", "state_home": "host"}
    (here / "edited.json").write_text(json.dumps(content))
    assert "set its state_home to device" in plan.refused("verify", "edited.json")


def test_a_plan_without_copies_has_no_owners(plan: Any) -> None:
    alone = (*USUAL, "--mesh", "4", "--shard", "*=-")
    assert "set data to 2 or more" in plan.refused(*alone, *SERVERS)
    found = plan.json(*alone, "--zero-by", "parameters", "-o", "plan.json")
    assert "zero_by" not in found["update"]
    assert "legal" in plan("verify", "plan.json").out
