"""Plans decided by hand: degrees, modes, strategies, and what contradicts what."""

import json
from pathlib import Path
from typing import Any

import pytest

from planner.plan.file import load_plan

pytestmark = pytest.mark.usefixtures("searched_once")

TINY = ("--model", "llama-tiny", "--hardware", "cpu", "--devices", "4")
Q_PROJ = "model.layers.0.self_attn.q_proj/linear"


def strategies(path: Path) -> dict[str, tuple[str | None, ...]]:
    return {name: strategy for group in load_plan(path).groups for name, strategy in group.operators}


def test_degrees_are_kept(plan: Any, here: Path) -> None:
    options = ("--tensor", "2", "--pipeline", "2", "--zero", "0", "--micro-batch", "4", "--recompute", "full")
    content = plan.json(*TINY, *options, "--no-sequence-parallel", "-o", "plan.json")
    assert content["degrees"] == {"data": 1, "tensor": 2, "context": 1, "expert": 1, "pipeline": 2, "replicated": 1}
    assert (content["micro_batches"], content["recomputation"]) == (4, "full")
    assert (content["sequence_parallel"], content["optimizer_sharding"]) == (False, "off")
    assert load_plan(here / "plan.json").training.part == 4


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("zero", "words"), [("0", "off"), ("1", "1 (states)"), ("2", "2 (gradients and states)"), ("3", "3 (weights")]
)
def test_zero(plan: Any, zero: str, words: str) -> None:
    content = plan.json(*TINY, "--data", "4", "--zero", zero, "--micro-batches", "1")
    assert content["optimizer_sharding"].startswith(words)
    assert content["degrees"]["data"] == 4


@pytest.mark.cases(2, 3)
@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        (("--interleave", "2"), ("1f1b", 1, 2)),
        (("--slices", "4"), ("seqpipe", 4, 1)),
        (("--slices", "4", "--virtual-stages", "2"), ("seqpipe", 4, 1)),
        (("--schedule", "seqpipe", "--slices", "2", "--interleave", "2"), ("seqpipe", 2, 2)),
        (("--schedule", "pipedream_2bw"), ("pipedream_2bw", 1, 1)),
        (("--schedule", "pipedream"), ("pipedream", 1, 1)),
    ],
)
def test_what_is_decided_behind_the_search(plan: Any, here: Path, options: tuple[str, ...], chosen: Any) -> None:
    content = plan.json(*TINY, "--pipeline", "2", "--mesh", "2", "--micro-batches", "4", *options, "-o", "plan.json")
    assert (content["schedule"], content["slices"], content["interleave"]) == chosen
    kept = load_plan(here / "plan.json")
    assert (kept.schedule, kept.slices, kept.training.interleave) == chosen
    assert kept.prediction.step_seconds == content["step_seconds"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--schedule", "seqpipe"), "takes a sequence in slices, not slices = 1; take slices = 2 or more"),
        (("--slices", "2", "--schedule", "gpipe"), "slices = 2 is for schedule = seqpipe"),
        (
            ("--slices", "3", "--pipeline", "2"),
            "3 do not divide a sequence of 128; the nearest legal values are 2 and 4",
        ),
        (("--interleave", "2", "--schedule", "zb_h1"), "interleave = 2 is not for schedule = zb_h1"),
        (("--interleave", "some"), "--interleave 'some' is not legal"),
    ],
)
def test_what_cannot_be_taken_so_is_refused(plan: Any, options: tuple[str, ...], message: str) -> None:
    assert message in " ".join(plan.refused(*TINY, *options).split())


@pytest.mark.thorough
def test_virtual_stages(plan: Any, here: Path) -> None:
    options = ("--pipeline", "2", "--mesh", "2", "--micro-batches", "4")
    assert plan.json(*TINY, *options, "--virtual-stages", "2")["virtual_stages"] == 2
    chosen = plan.json(*TINY, *options, "--virtual-stages", "auto")
    alone = plan.json(*TINY, *options, "--schedule", "1f1b")
    assert (alone["virtual_stages"], alone["schedule"]) == (1, "1f1b")
    assert chosen["step_seconds"] <= alone["step_seconds"]


@pytest.mark.slow
def test_strategies_by_name(plan: Any, here: Path) -> None:
    once = ("--micro-batches", "1", "--recompute", "none")
    plan.json(*TINY, "--mesh", "4", *once, "--shard", "*q_proj/linear=o", "--shard", "*mlp.down*=-", "-o", "plan.json")
    found = strategies(here / "plan.json")
    assert found[Q_PROJ] == ("o",)
    assert found["model.layers.0.mlp.down_proj/linear"] == (None,)
    plan.json(*TINY, "--mesh", "2x2", *once, "--shard", "*q_proj/linear=((2,1,1),(2,1))", "-o", "cuts.json")
    assert sorted(strategies(here / "cuts.json")[Q_PROJ]) == ["b", "o"]  # type: ignore[type-var]


@pytest.mark.slow
@pytest.mark.thorough
def test_strategies_of_a_plan_file(plan: Any, here: Path) -> None:
    """All that the file lists are kept; what is deleted from it, or decided by --shard, is not."""
    plan.json(*TINY, "--tensor", "4", "--zero", "0", "--micro-batches", "4", "-o", "first.json")
    before = strategies(here / "first.json")
    plan.json(*TINY, "--shard-from", "first.json", "--pipeline", "1", "-o", "second.json")
    assert strategies(here / "second.json") == before
    content = json.loads((here / "first.json").read_text())
    for group in content["groups"]:
        group["operators"] = {name: text for name, text in group["operators"].items() if "mlp" in name}
    (here / "some.json").write_text(json.dumps(content))
    plan.json(*TINY, "--mesh", "4", "--shard-from", "some.json", "--shard", "*mlp.up_proj*=b", "-o", "third.json")
    after = strategies(here / "third.json")
    assert after["model.layers.0.mlp.up_proj/linear"] == ("b",)
    assert all(after[name] == before[name] for name in before if "mlp" in name and "up_proj" not in name)
    assert after != before
    plan.json(*TINY, "--mesh", "4", "--shard-from", "first.json:*q_proj*", "-o", "fourth.json")
    assert strategies(here / "fourth.json")[Q_PROJ] == before[Q_PROJ]


@pytest.mark.thorough
@pytest.mark.slow
def test_experts(plan: Any) -> None:
    mixture = ("--model", "mixtral-tiny", "--hardware", "cpu", "--devices", "4")
    content = plan.json("estimate", *mixture, "--tensor", "2", "--expert", "2")
    assert content["degrees"] == {
        **dict.fromkeys(("context", "pipeline", "replicated"), 1),
        "data": 2,
        "tensor": 2,
        "expert": 2,
    }
    assert [axis["role"] for axis in content["mesh"]] == ["data", "tensor"]
    assert plan.json("estimate", *mixture)["degrees"]["expert"] == 1
    assert "does not divide the 8 experts" in plan.refused(*mixture[:-1], "6", "--expert", "3")
    assert "expert = 4 does not divide data x context" in plan.refused(*mixture, "--tensor", "2", "--expert", "4")
    whole = ("--data", "4", "--tensor", "1", "--pipeline", "1", "--context", "1", "--expert", "4")
    even = plan.json(*mixture, *whole)
    assert even["degrees"]["expert"] == 4
    uneven = plan.json(*mixture, *whole, "--imbalance", "1.5", "-o", "uneven.json")
    assert uneven["step_seconds"] > even["step_seconds"]
    assert "maximum 1.5 times the mean" in plan("show", "uneven.json").out
    assert "imbalance = 0.9" in plan.refused(*mixture, "--imbalance", "0.9")


@pytest.mark.thorough
@pytest.mark.slow
def test_modes(plan: Any) -> None:
    data = plan.json(*TINY, "--mode", "data_parallel")
    assert (data["degrees"]["data"], data["optimizer_sharding"]) == (4, "off")
    alone = plan.json(*TINY[:4], "--mode", "stand_alone")
    assert (alone["devices"], alone["mesh"]) == (1, [])
    semi = plan.json(*TINY, "--mode", "semi_auto_parallel", "--shard", "*q_proj*=o", "--mesh", "4")
    assert semi["search"]["algorithm"] == "dynamic_programming"
    spread = ("--mode", "semi_auto_parallel", "--shard", "*q_proj*=o", "--search", "sharding_propagation")
    assert plan.json(*TINY, *spread, "--mesh", "4")["search"]["algorithm"] == "sharding_propagation"
    assert plan.json(*TINY, "--mode", "auto_parallel", "--mesh", "4")["search"]["algorithm"] == "dynamic_programming"
    degrees = ("--tensor", "2", "--pipeline", "1", "--data", "2", "--zero", "1", "--micro-batches", "2")
    assert plan.json(*TINY, "--mode", "hybrid_parallel", *degrees)["degrees"]["tensor"] == 2


@pytest.mark.thorough
def test_operators_that_nobody_decided_are_data_parallel(plan: Any, here: Path) -> None:
    """As in MindSpore: the others split the batch, weights that only they read are whole everywhere."""
    semi = (*TINY, "--mode", "semi_auto_parallel", "--shard", "*mlp.up_proj*=o", "--mesh", "4", "--micro-batches", "1")
    content = plan.json(*semi, "--default", "data_parallel", "-o", "default.json")
    searched = plan.json(*semi, "-o", "searched.json")
    assert searched["step_seconds"] <= content["step_seconds"] * 1.001
    found = load_plan(here / "default.json")
    (decided,) = {s for name, s in strategies(here / "default.json").items() if "mlp.up_proj/" in name}
    assert decided == ("o",)
    linears = {
        s for name, s in strategies(here / "default.json").items() if "/linear" in name and "up_proj" not in name
    }
    assert linears == {("b",)}
    stored = {name: one for group in found.groups for name, one in group.parameters if "up_proj" not in name}
    assert not any(part.is_shard for one in stored.values() for part in (*one.weight, *one.gradient, *one.state))
    assert "do not divide over the 4 devices" in plan.refused(
        *semi[:-2], "--global-batch", "2", "--default", "data_parallel"
    )


def test_a_plan_edited_by_hand_is_verified_priced_and_run_in_one_command(plan: Any, here: Path) -> None:
    made = plan.json(*TINY[:4], "--devices", "1", "--global-batch", "2", "-o", "plan.json")
    told = plan("--mode", "manual", "plan.json")
    assert (told.code, told.err) == (0, "")
    assert "legal and fits; as its figures say" in told.out
    content = json.loads((here / "plan.json").read_text())
    content["training"]["micro_batches"] = 3 - made["micro_batches"]
    (here / "plan.json").write_text(json.dumps(content))
    again = plan.json("--mode=manual", "plan.json", "-o", "priced.json")
    assert again["step_seconds_in_file"] == made["step_seconds"] != again["step_seconds"]
    priced = load_plan(here / "priced.json")
    assert (priced.prediction.step_seconds, priced.provenance.gap) == (again["step_seconds"], 1.0)
    assert "edited: its figures say" in plan("search", "--mode", "manual", "plan.json").out
    assert "leave out --steps" in plan("manual", "plan.json", "--json", "--steps", "1").err
    content["groups"][0]["operators"] = {}
    (here / "plan.json").write_text(json.dumps(content))
    assert "has no strategy in the plan" in plan.refused("--mode", "manual", "plan.json", "--steps", "2")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_an_edited_plan_runs_as_the_unsharded_model_does(plan: Any, here: Path) -> None:
    plan.json(*TINY[:4], "--devices", "2", "--mesh", "2", "--global-batch", "4", "-o", "plan.json")
    text = (here / "plan.json").read_text()
    content = json.loads(text)
    for group in content["groups"]:
        if "model.layers.0.mlp.up_proj/linear" in group["operators"]:
            group["operators"]["model.layers.0.mlp.up_proj/linear"] = "o"
    (here / "plan.json").write_text(json.dumps(content))
    told = plan("--mode", "manual", "plan.json", "--steps", "2")
    assert told.code == 0, told.err
    assert "agrees with the unsharded model" in told.out


@pytest.mark.cases(26, 1)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--mode", "manual"), ("--mode manual leaves nothing to search", "plan --mode manual PLAN.json --steps 5")),
        (("--default", "data_parallel"), ("default: data_parallel", "--shard", "--mode data_parallel")),
        (("--default", "data"), ("--default 'data'", "data_parallel")),
        (("--shard", "*q_proj*=o", "--tensor", "2", "--default", "data_parallel"), ("degrees say otherwise", "--mesh")),
        (("--mode", "hybrid"), ("--mode 'hybrid'", "did you mean hybrid_parallel")),
        (("--mode", "stand_alone"), ("one device", "--devices 4")),
        (("--mode", "data_parallel", "--tensor", "2"), ("splits the batch", "--tensor 2")),
        (("--mode", "data_parallel", "--zero", "1"), ("weights whole", "--zero 1")),
        (("--mode", "data_parallel", "--mesh", "4"), ("leave out --mesh", "auto_parallel")),
        (("--mode", "semi_auto_parallel"), ("--shard PATTERN=STRATEGY", "--shard-from PLAN")),
        (
            ("--mode", "hybrid_parallel", "--tensor", "2"),
            ("--pipeline, --data, --zero, --micro-batch or --micro-batches",),
        ),
        (("--tensor", "3"), ("tensor = 3 does not divide 4 devices; the nearest legal values are tensor = 2 and 4",)),
        (
            ("--tensor", "2", "--data", "2", "--pipeline", "2", "--context", "1"),
            ("pipeline = 2 x data = 2 x context = 1 x tensor = 2 makes 8, not 4 devices", "data = 1"),
        ),
        (("--tensor", "2", "--mesh", "4"), ("--mesh and --tensor", "give one of them")),
        (("--micro-batch", "1", "--micro-batches", "2"), ("--micro-batch and --micro-batches",)),
        (("--expert", "2"), ("expert = 2", "leave it at 1")),
        (("--virtual-stages", "two"), ("--virtual-stages 'two'", "auto")),
        (("--virtual-stages", "0"), ("--virtual-stages '0'", "auto")),
        (("--shard", "q_proj"), ("--shard 'q_proj'", "PATTERN=STRATEGY")),
        (("--shard", "*q_proj*="), ("--shard *q_proj*=", "b,o")),
        (("--shard", "*q_porj*=o"), ("--shard *q_porj*", "operator")),
        (("--shard", "*q_proj*=zz"), (Q_PROJ, "no factor 'zz'", "b, s, i, o")),
        (("--shard", "*q_proj*=((1,x))"), ("--shard *q_proj*", "as in ((4,1,1),(1,2))")),
        (("--shard-from", "none.json"), ("none.json: cannot be read",)),
        (("--memory-limit", "5x"), ("--memory-limit '5x'", "64GiB")),
        (("--memory-limit", "0"), ("leaves no memory",)),
        (("--objective", "speed"), ("--objective 'speed'", "cost, memory, time")),
        (("--pareto", "--top", "2"), ("--pareto and --top", "give one of them")),
        (("--pareto", "--objective", "memory"), ("--pareto and --objective memory", "--objective cost")),
    ],
)
def test_contradictions_are_one_line(plan: Any, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    message = plan.refused(*TINY, *arguments)
    assert all(word in message for word in words), message


@pytest.mark.thorough
def test_a_plan_for_another_model_gives_no_strategies(plan: Any, here: Path) -> None:
    once = ("--micro-batches", "1", "--recompute", "none")
    plan.json(*TINY, "--mode", "data_parallel", *once, "-o", "llama.json")
    message = plan.refused("--model", "gpt-tiny", "--hardware", "cpu", "--devices", "4", "--shard-from", "llama.json")
    assert "--shard-from llama.json: it is a plan for another model" in message
    message = plan.refused(*TINY, "--shard-from", "llama.json:*nothing*")
    assert "it lists no operator that matches" in message
    plan.json(*TINY[:4], "--mode", "stand_alone", *once, "-o", "one.json")
    assert "its mesh is one device" in plan.refused(*TINY, "--shard-from", "one.json")
