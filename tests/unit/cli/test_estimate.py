"""`plan estimate`: one configuration, or a plan file, priced."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from planner.plan.file import load_plan

pytestmark = pytest.mark.usefixtures("searched_once")

TINY = ("--model", "llama-tiny", "--hardware", "cpu", "--devices", "4")


def test_degrees_that_are_missing_are_filled_in(plan: Any, here: Path) -> None:
    content = plan.json("estimate", *TINY, "--tensor", "2")
    assert content["degrees"] == {"data": 2, "tensor": 2, "context": 1, "expert": 1, "pipeline": 1, "replicated": 1}
    assert (content["optimizer_sharding"], content["plan_file"]) == ("off", None)
    assert sum(content["time_seconds"].values()) == pytest.approx(content["step_seconds"])
    reasons = {choice["name"]: choice["why"] for choice in content["choices"]}
    assert (reasons["data"], reasons["ZeRO"], reasons["micro-batches"]) == ("from the devices", "default", "best")
    assert "tensor" not in reasons
    assert list(here.iterdir()) == []


def test_the_mesh_leaves_the_pipeline(plan: Any) -> None:
    content = plan.json("estimate", *TINY, "--mesh", "2", "--micro-batches", "4")
    assert (content["degrees"]["pipeline"], content["micro_batches"]) == (2, 4)
    assert [axis["size"] for axis in content["mesh"]] == [2]


def test_an_estimate_is_what_a_search_would_say(plan: Any) -> None:
    """Of the fastest plan, as an estimate has no simpler ones."""
    degrees = ("--tensor", "2", "--pipeline", "2", "--data", "1", "--zero", "0", "--context", "1")
    both = ("--tensor", "2", "--pipeline", "2", "--micro-batches", "4")
    searched = plan.json(*TINY, *degrees, *both[4:], "--virtual-stages", "1", "--simplicity", "0")
    estimated = plan.json("estimate", *TINY, *both)
    assert estimated["step_seconds"] == searched["step_seconds"]
    assert estimated["peak_bytes"] == searched["peak_bytes"]


def test_the_report_says_what_was_chosen(plan: Any, here: Path) -> None:
    outcome = plan("estimate", *TINY, "--tensor", "2", "-o", "plan.json")
    assert (outcome.code, outcome.err) == (0, "")
    for words in ("Not given", "from the devices", "of this configuration", "step time", "plan.json"):
        assert words in outcome.out
    assert plan("verify", "plan.json").code == 0


def test_a_plan_file_costs_what_it_says(plan: Any, here: Path) -> None:
    made = plan.json(*TINY, "--mode", "data_parallel", "-o", "plan.json")
    again = plan.json("estimate", "plan.json")
    assert again["step_seconds"] == made["step_seconds"] == again["step_seconds_in_file"]
    assert "this is as now" in plan("estimate", "plan.json").out


def test_a_plan_file_on_another_machine(plan: Any, here: Path) -> None:
    """Other links and devices; more devices make the data parallel axis longer."""
    plan.json(*TINY, "--mode", "data_parallel", "-o", "plan.json")
    faster = plan.json("estimate", "plan.json", "--hardware", "h100-80gb", "-o", "h100.json")
    assert faster["hardware"] == "h100-80gb"
    assert faster["step_seconds"] < faster["step_seconds_in_file"]
    assert plan("verify", "h100.json").code == 0
    assert load_plan(here / "h100.json").provenance.status == "feasible"
    more = plan.json("estimate", "plan.json", "--devices", "8")
    assert (more["degrees"]["data"], more["global_batch"]) == (8, 16)
    assert "less" in plan("estimate", "plan.json", "--devices", "8").out


def test_plans_that_cannot_be_moved(plan: Any, here: Path) -> None:
    plan.json(*TINY, "--tensor", "4", "--zero", "0", "--micro-batches", "4", "-o", "tensor.json")
    message = plan.refused("estimate", "tensor.json", "--devices", "8")
    assert "tensor.json: " in message
    assert "no data parallel axis" in message
    plan.json(*TINY, "--mode", "data_parallel", "-o", "data.json")
    assert "16 samples each, which 3 devices cannot share" in plan.refused("estimate", "data.json", "--devices", "3")
    message = plan.refused("estimate", "data.json", "--zero", "1", "--model", "llama-tiny")
    assert "--zero: data.json decides that" in message
    assert "none.json" in plan.refused("estimate", "none.json")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("--model NAME",)),
        ((*TINY, "--data", "2"), ("--data 2", "= 2 must make the 4 devices")),
        ((*TINY, "--tensor", "3"), ("tensor = 3", "4 devices", "tensor = 2 and 4")),
        ((*TINY, "--mesh", "3"), ("--mesh 3 has 3 devices", "4")),
        ((*TINY, "--pareto"), ("--pareto compares configurations",)),
        ((*TINY, "--objective", "cost"), ("--objective cost compares configurations",)),
    ],
)
def test_bad_estimates_are_one_line(plan: Any, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    message = plan.refused("estimate", *arguments)
    assert all(word in message for word in words), message


@pytest.mark.slow
@pytest.mark.thorough
def test_what_does_not_fit_says_how_much_is_missing(plan: Any, here: Path) -> None:
    message = plan.refused("estimate", *TINY, "--tensor", "2", "--memory-limit", "520MiB", code=3)
    assert "GiB more than the 0.508 GiB available" in message
    assert "--memory-limit left out" in message
    plan.json(
        "estimate", "--model", "gpt2-medium", "--devices", "1", "--global-batch", "8", "--micro-batches", "1",
        "-o", "gpt2.json",
    )  # fmt: skip
    message = plan.refused("estimate", "gpt2.json", "--hardware", "cpu", code=3)
    assert "gpt2.json does not fit on 1 x cpu" in message
    assert "GiB more than the 4.0 GiB available" in message


def test_a_plan_needs_room_on_the_hosts_of_another_machine_too(plan: Any, here: Path) -> None:
    once = ("--devices", "1", "--global-batch", "4", "--micro-batches", "1", "--recompute", "none", "--seq-len", "32")
    plan.json("estimate", *TINY[:4], *once, "--offload", "optimizer", "-o", "plan.json")
    text = files("hardware_profiles").joinpath("cpu.toml").read_text()
    (here / "small.toml").write_text(text.replace("memory_gib = { value = 16,", "memory_gib = { value = 0.04,"))
    message = plan.refused("estimate", "plan.json", "--hardware", "small.toml", code=3)
    assert "plan.json does not fit on 1 x cpu: 22.0 MiB are kept on the host" in message
    assert plan("estimate", "plan.json", "--layouts").code == 0


def test_options_stand_behind_the_command(plan: Any) -> None:
    message = plan.refused(*TINY, "estimate")
    assert "--model, --devices, --hardware: put options after the command, as in plan estimate --model" in message
