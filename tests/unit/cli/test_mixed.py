"""Several kinds of devices on the command line: planned, shown, verified, priced again, or refused."""

from pathlib import Path
from typing import Any

import pytest

import hardware_profiles
from planner.api.exporting import hosts_of, per_node_of
from planner.errors import RequestError
from tests.refusals import refused

JOB = ("--model", "llama-tiny", "--pipeline", "2", "--global-batch", "16")
TWO = "h100-80gb:2,a100-80gb:2,between@12.5"


@pytest.mark.slow
@pytest.mark.thorough
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


@pytest.fixture
def made(plan: Any, here: Path) -> dict[str, Any]:
    """A plan in plan.json with four stages, two on each kind."""
    found: dict[str, Any] = plan.json(
        "--model", "llama-tiny", "--pipeline", "4", "--global-batch", "16", "--hardware", TWO, "-o", "plan.json"
    )
    return found


@pytest.mark.thorough
def test_a_report_has_every_group(plan: Any, made: dict[str, Any], here: Path) -> None:
    found = plan.json("report", "plan.json", "--time-limit", "1", "-o", "page.html")
    network, memory = found["network"], found["memory"]
    order = [group["profile"] for group in network["groups"]]
    assert sorted(order) == ["a100-80gb", "h100-80gb"]
    assert [(group["first_rank"], group["ranks"], group["devices"]) for group in network["groups"]] == [
        (0, 2, 2),
        (2, 2, 2),
    ]
    assert {level["bandwidth"] for group in network["groups"] for level in group["levels"][:1]} == {4.5e11, 3e11}
    assert (network["between"]["name"], network["between"]["bandwidth"]) == ("between groups", 12.5e9)
    assert [one["group"] for one in memory["ranks"]] == [order[0], order[0], order[1], order[1]]
    assert [one["capacity_bytes"] for one in memory["ranks"]] == pytest.approx([79.1 * 2**30] * 4)
    sent = sum(one["seconds"] for one in network["crossings"] if one["kind"] == "send_recv")
    assert sent == pytest.approx(dict(found["prediction"]["time"])["stage transfer"], rel=1e-9)
    assert {one["level"] for one in network["crossings"] if one["kind"] == "send_recv"} <= {"node", "between groups"}
    assert "onventional plans" in found["choices"]["note"]
    page = (here / "page.html").read_text()
    for words in (f"{order[0]}: stages 0 to 1, 2 devices", "between groups", f"stage 3 on {order[1]}"):
        assert words in page
    assert plan("report", "plan.json", "--trace", "trace.json").code == 0


@pytest.mark.thorough
def test_what_crosses_is_priced_at_the_link_that_it_takes(plan: Any, made: dict[str, Any]) -> None:
    """Every rank's messages, by the report, take as long as its waits, by the prediction."""
    from planner.cli.commands.show import traced_again
    from planner.plan.binding.machine import machine_of
    from planner.plan.compare.dissection import dissect
    from planner.plan.compare.verify import verify
    from planner.plan.file import load_plan
    from planner.report.data.network import network_of

    loaded = load_plan(Path("plan.json"))
    machine = machine_of(loaded.cluster)
    model = traced_again(loaded, None)
    bound = verify(loaded, model.graph, model.batch, machine).bound
    levels = set()
    for number, rank in enumerate(dissect(bound, machine)):
        found = network_of(bound, rank, number, machine)
        sent = [one for one in found.crossings if one.part == "stage transfer"]
        turns = loaded.training.micro_batches * loaded.slices
        assert sum(one.seconds for one in sent) == pytest.approx(turns * rank.cost.micro_batch["stage transfer"])
        levels.add(frozenset(one.level for one in sent))
    assert levels == {frozenset({"node"}), frozenset({"node", "between groups"})}


@pytest.mark.slow
@pytest.mark.thorough
def test_what_a_plan_depends_on_is_said_group_by_group(plan: Any, made: dict[str, Any]) -> None:
    found = plan.json("explain", "plan.json", "--no-search")
    names = [row["name"] for row in found["sensitivities"]]
    assert [name for name in dict.fromkeys(names) if "bandwidth" in name] == [
        "bandwidth of links between groups",
        *(f"bandwidth of node of {name}" for name in dict.fromkeys(run["group"] for run in made["groups"])),
    ]
    kept = {(row["name"], row["change"]): row["kept"]["step_seconds"] for row in found["sensitivities"]}
    assert kept["as it is", ""] == made["step_seconds"]
    assert kept["bandwidth of links between groups", "x 2"] < made["step_seconds"]
    assert kept["bandwidth of links between groups", "/ 2"] > made["step_seconds"]
    again = plan.json("explain", "plan.json", "--no-search", "*.0.mlp.up_proj*")
    assert any(choice["chosen"] for one in again["subjects"] for choice in one["choices"])


@pytest.mark.thorough
def test_engines_are_told_the_order_of_hosts(plan: Any, made: dict[str, Any], here: Path) -> None:
    found = plan.json("export", "plan.json", "--to", "megatron", "-o", "out", "--approximate")
    assert [(one["first"], one["count"]) for one in found["hosts"]] == [(0, 1), (1, 1)]
    assert "--nnodes 2 --nproc-per-node 2" in (here / "out/launch.sh").read_text()
    told = plan("export", "plan.json", "--to", "nemo", "-o", "nemo", "--approximate").out
    assert (
        f"give the launch node ranks 0 of {found['hosts'][0]['profile']}, 1 of {found['hosts'][1]['profile']}" in told
    )


def test_hosts_are_counted_in_the_order_of_the_groups_and_must_be_alike() -> None:
    with refused(RequestError, 8, "h100-80gb", 4, "a100-80gb"):
        per_node_of(hardware_profiles.load_mixed("h100-80gb:8,a100-80gb[node=4,cluster@25]:8"))
    machine = hardware_profiles.load_mixed("h100-80gb:32,a100-80gb:8")
    assert [one.words for one in hosts_of(machine, per_node_of(machine))] == ["0 to 3 of h100-80gb", "4 of a100-80gb"]


@pytest.mark.thorough
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
        (("--hardware", TWO, "--virtual-stages", "2"), "slower devices gets fewer"),
        (("--hardware", TWO, "--offload", "optimizer"), "nothing is offloaded there"),
        (("--hardware", "h100-80gb:2,a100-80gb"), "'a100-80gb' is not a group of devices"),
    ],
)
def test_what_there_is_not_is_refused_in_one_line(plan: Any, arguments: tuple[str, ...], words: str) -> None:
    assert words in plan.refused("--model", "llama-tiny", "--global-batch", "16", *arguments)


def test_a_profile_of_its_own_keeps_the_levels_of_a_plan(plan: Any, here: Path) -> None:
    """Its file says what the devices are, the plan how they are connected."""
    packaged = Path(hardware_profiles.__file__).with_name("cpu.toml")
    (here / "own.toml").write_text(packaged.read_text())
    asked = ("--model", "llama-tiny", "--devices", "4", "--hardware", "cpu", "--cluster", "machine=4@1")
    made = plan.json(*asked, "--mesh", "4", "--micro-batches", "2", "-o", "plan.json")
    again = plan.json("estimate", "plan.json", "--hardware", "own.toml")
    assert again["cluster"] == made["cluster"] == "machine=4@1"
    assert again["step_seconds"] == made["step_seconds"]
