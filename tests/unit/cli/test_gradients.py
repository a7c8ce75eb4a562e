"""What becomes of gradients, from options to the plan file and to what people read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.cli.values import parse_buckets
from planner.errors import RequestError
from planner.plan.file import load_plan
from planner.sharding.update import PLAIN, Update
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("searched_once")

TINY = ("--model", "llama-tiny", "--hardware", "cpu", "--devices", "4", "--mesh", "4")
ONCE = ("--micro-batches", "1", "--recompute", "none")


def test_options_reach_the_plan_and_are_shown(plan: Any, here: Path) -> None:
    options = ("--gradients", "sum", "--clip-norm", "0.5", "--buckets", "auto", "--broadcast", "--optimizer", "lamb")
    content = plan.json(*TINY, *ONCE, *options, "--gradient-dtype", "fp32", "--gathers", "block", "-o", "plan.json")
    found = load_plan(here / "plan.json").training
    size = found.update.buckets
    assert isinstance(size, int), "auto has become a size"
    given = {"gradients": "sum", "clip_norm": 0.5, "broadcast": True, "gradient_dtype": "fp32", "gathers": "block"}
    assert found.update == Update(buckets=size, **given)
    assert found.optimizer == "lamb"
    assert content["update"] == {
        key: value for key, value in json.loads((here / "plan.json").read_text())["training"].items()
        if key not in ("global_batch", "micro_batches", "precision", "optimizer")
    }  # fmt: skip
    words = f"gradients summed, all in fp32, clipped to norm 0.5, in buckets of {size / 2**20:.3g} MiB"
    words += "; weights all-gathered by block"
    assert words in " ".join(plan("show", "plan.json").out.split())
    assert words in plan("verify", "plan.json").out


@pytest.mark.thorough
def test_states_by_whole_parameters(plan: Any, here: Path) -> None:
    """Whoever has most has hardly more than a third, though the table of tokens is a whole parameter."""
    three = ("--model", "llama-tiny", "--hardware", "cpu", "--devices", "3", "--global-batch", "12", "--data", "3")
    whole = plan.json(*three, *ONCE, "--zero", "0", "-o", "whole.json")
    found = plan.json(*three, *ONCE, "--zero", "1", "--zero-by", "parameters", "-o", "plan.json")
    assert found["update"]["zero_by"] == "parameters"
    assert load_plan(here / "plan.json").training.update.owned
    states = [one["memory_bytes"]["optimizer state"] for one in (found, whole)]
    assert states[1] / 3 <= states[0] < states[1] / 2.5
    assert found["time_seconds"]["weight gathering"] > 0.0
    shown = " ".join(plan("show", "plan.json").out.split())
    assert "optimizer states by whole parameters, new weights broadcast" in shown
    assert "ZeRO-1 by parameters" in shown
    assert "zero = 2 is another stage" in plan.refused(*three, "--zero", "2", "--zero-by", "parameters")
    assert "leave optimizer out of offload" in plan.refused(*three, "--zero-by", "parameters", "--offload", "optimizer")
    assert "--zero-by slices" in plan.refused("export", "plan.json", "--to", "megatron", "-o", "out", "--nearest")
    pipeline = ("--model", "llama-tiny", "--hardware", "cpu", "--devices", "2", "--pipeline", "2")
    assert "updates weights after every micro-batch" in plan.refused(
        *pipeline, "--schedule", "pipedream", "--zero-by", "parameters"
    )


@pytest.mark.thorough
def test_who_owns_states_may_be_left_to_the_search(plan: Any) -> None:
    """On three devices slices are padded, and need more memory; buckets would fill what is left of it."""
    small = ("--model", "llama-tiny", "--set", "num_layers=1", "--seq-len", "16", "--hardware", "cpu", "--devices", "3")
    asked = (*small, "--global-batch", "3", "--data", "3", "--zero", "1", "--objective", "memory")
    asked = (*asked, "--buckets", "none", "--zero-by")
    found, sliced = plan.json(*asked, "auto"), plan.json(*asked, "slices")
    assert found["update"]["zero_by"] == "parameters"
    assert found["peak_bytes"] < sliced["peak_bytes"]


def test_states_on_parameter_servers(plan: Any, here: Path) -> None:
    usual = ("--model", "llama-tiny", "--hardware", "cpu", "--devices", "4")
    found = plan.json(*usual, *ONCE, "--mode", "parameter_server", "-o", "plan.json")
    assert found["update"]["zero_by"] == "servers"
    assert found["memory_bytes"]["optimizer state"] == 0.0
    assert dict(load_plan(here / "plan.json").prediction.offloaded)["host"] > 0.0
    assert "parameter servers on the hosts" in " ".join(plan("show", "plan.json").out.split())
    refused = plan.refused("export", "plan.json", "--to", "megatron", "-o", "out", "--nearest")
    assert "has no parameter servers" in refused
    assert "has no lamb" in plan.refused(*usual, "--zero-by", "servers", "--optimizer", "lamb")
    assert "on the hosts of servers anyway" in plan.refused(*usual, "--zero-by", "servers", "--offload", "optimizer")
    assert "keeps states on parameter servers" in plan.refused(*usual, "--mode", "parameter_server", "--tensor", "2")


def test_auto_is_a_word_for_the_search(plan: Any, here: Path) -> None:
    plan.json(*TINY[:-2], *ONCE, "--data", "4", "--zero", "3", "--gathers", "auto", "-o", "plan.json")
    assert load_plan(here / "plan.json").training.update.gathers in ("each", "block", "ahead")
    content = json.loads((here / "plan.json").read_text())
    content["training"]["gathers"] = "auto"
    (here / "plan.json").write_text(json.dumps(content))
    found = plan.refused("verify", "plan.json")
    assert "training.gathers: 'auto' is a word for the search; write one of each, block, ahead" in found


@pytest.mark.thorough
@pytest.mark.slow
def test_nothing_is_said_where_nothing_was_asked(plan: Any, here: Path) -> None:
    """Gradients are reduced in buckets whose size the search has chosen; one that changes nothing is not written."""
    alone = ("--gathers", "each")
    found = plan.json(*TINY, *alone, "-o", "plan.json")["update"]
    assert set(found) == {"buckets"}
    assert found["buckets"] > 0
    assert load_plan(here / "plan.json").training.update == replace(PLAIN, **found)
    assert plan.json(*TINY[:-4], "--devices", "1", "-o", "one.json")["update"] == {}
    assert plan.json(*TINY, *alone, "--buckets", "none", "-o", "plan.json")["update"] == {}
    assert load_plan(here / "plan.json").training.update == PLAIN
    assert plan("verify", "plan.json").out.startswith("legal; ")


def test_local_parameters(plan: Any, here: Path) -> None:
    plan.json(*TINY, *ONCE, "--local-parameters", "*norm*", "-o", "plan.json")
    stored = {n: s for group in load_plan(here / "plan.json").groups for n, s in group.parameters}
    assert {str(s.gradient[0]) for n, s in stored.items() if "norm" in n} == {"P"}
    assert "no parameter of the model matches 'router'" in plan.refused(*TINY, "--local-parameters", "router")


@pytest.mark.parametrize(
    ("text", "buckets"),
    [
        ("none", "none"),
        ("auto", "auto"),
        ("25MiB", 25 * 2**20),
        ("64 kib", 2**16),
        ("20,35", (20, 35)),
        ("7", (7,)),
        ("*attn*=0, *mlp*=1", (("*attn*", 0), ("*mlp*", 1))),
    ],
)
def test_buckets(text: str, buckets: object) -> None:
    assert parse_buckets(text) == buckets


@pytest.mark.parametrize("text", ["", "some", "5MiB,3", "a=b", "12 apples", "9" * 400 + "GiB"])
def test_what_is_no_bucket(text: str) -> None:
    with refused(RequestError, "none", "auto", "25MiB"):
        parse_buckets(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--clip-norm", "0"), "--clip-norm: 0.0 is no norm"),
        (("--gradients", "max"), "unknown value for --gradients 'max'"),
        (("--buckets", "35,20"), "do not rise"),
    ],
)
def test_what_cannot_be_is_refused(plan: Any, options: tuple[str, ...], words: str) -> None:
    assert words in plan.refused(*TINY, *options)
