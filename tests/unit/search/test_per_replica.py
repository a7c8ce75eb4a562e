"""Requests for operators that every replica computes by itself: how many there are, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.errors import PlannerError, RequestError
from planner.export.description import ExportError
from planner.export.mindspore import mindspore
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.plan.binding.bind import bind
from planner.plan.file import load_plan, save_plan
from planner.report.command import command_of
from planner.report.rows import job_text
from planner.strategy_search.request.per_replica import parse_per_replica
from tests.refusals import refused
from tests.replicas import SAMPLES, batch, network


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return trace(network(), batch())


def plan_of(graph: OperatorGraph, pattern: str, pinned: dict[str, Any], devices: int = 4, **asked: Any) -> planner.Plan:
    words = {"global_batch": SAMPLES, "batch": SAMPLES, "precision": "fp32", "pinned": pinned, "per_replica": [pattern]}
    words["update"] = {"gathers": "each"}
    return planner.search(graph, "cpu", devices=devices, **{**words, **asked}).plan


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("pattern", "pinned", "replicas"),
    [
        ("*bn*", {"data": 2, "tensor": 2}, 2),
        ("*bn*", {"tensor": 2}, 2),
        ("*bn*=8", {"data": 4}, 8),
        ("*", {}, 4),
    ],
)
def test_replicas_are_those_of_data_parallelism(
    graph: OperatorGraph, pattern: str, pinned: dict[str, Any], replicas: int
) -> None:
    update = plan_of(graph, pattern, pinned).training.update
    assert (update.per_replica, update.replicas) == ((pattern.partition("=")[0],), replicas)


def test_statistics_of_replicas_are_not_reduced(graph: OperatorGraph, tmp_path: Path) -> None:
    """The plan takes less time than with synchronised statistics, and its file says what it computes."""
    pinned = {"data": 4, "micro_batches": 1, "zero": 0}
    own, whole = plan_of(graph, "*bn*", pinned), plan_of(graph, "*bn*", pinned, per_replica=())
    time = [dict(one.prediction.time)["communication"] for one in (own, whole)]
    assert time[0] < 0.8 * time[1]
    save_plan(own, tmp_path / "own.json")
    assert load_plan(tmp_path / "own.json").training.update == own.training.update
    assert "--per-replica '*bn*=4'" in command_of(own)
    assert "*bn* over the samples of each of 4 replicas" in job_text(own)[1]
    assert "replicas" not in job_text(whole)[1]


@pytest.mark.parametrize(
    ("pattern", "asked", "facts"),
    [
        ("*bn*=3", {}, (3, 16, "replicas = 2 and 4", 15, 18)),
        ("*bn*=3", {"pinned": {"data": 3}, "devices": 3}, (3, "values are global_batch = 15 and 18")),
        ("*bn*=999999999", {}, (999999999, "the nearest legal value is replicas = 16")),
        ("*bn*", {"devices": 32}, (32, "replicas = 16, global_batch = 32")),
        ("*bn*=1", {"pinned": {"data": 2}}, ("data = 2 does not divide 1 replica;",)),
        ("nothing=1", {}, ("nothing", "bn/_native_batch_norm_legit_functional")),
        ("nothing", {"pinned": {"data": 1}}, ("nothing", "bn/_native_batch_norm_legit_functional")),
        (" ", {}, ("PATTERN=N",)),
        ("*bn*=\u0663", {}, ("PATTERN=N", "'*norm*=4'")),
        ("*bn*", {"update": {"per_replica": ("",)}}, ("per_replica", "''", "'*norm*'")),
        ("*bn*=4", {"pinned": {"data": 8}, "devices": 8}, (8, 4)),
        ("*bn*", {"pinned": {"slices": 2, "pipeline": 2}}, ("slices", 2, "per_replica")),
        ("*bn*", {"engine": "megatron"}, ("*bn*", "Megatron-LM")),
        ("nothing", {"pinned": {"data": 4}}, ("nothing", "bn/_native_batch_norm_legit_functional")),
        ("=4", {}, ("=4", "PATTERN=N")),
    ],
)
def test_what_cannot_be_is_refused(
    graph: OperatorGraph, pattern: str, asked: dict[str, Any], facts: tuple[object, ...]
) -> None:
    with refused(RequestError, *facts):
        plan_of(graph, pattern, asked.pop("pinned", {}), **asked)


def test_files_that_were_edited_say_what_is_wrong(graph: OperatorGraph, tmp_path: Path) -> None:
    """The key, the numbers that clash, and what to write."""
    path = tmp_path / "own.json"
    save_plan(plan_of(graph, "*bn*", {"data": 4, "micro_batches": 1}), path)
    content = json.loads(path.read_text())
    for changed, facts in (
        ({"replicas": 0}, ("training.replicas", "*bn*", "16 samples of a micro-batch", "leave per_replica out")),
        ({"replicas": 3}, ("training.replicas", 3, 16, "2 and 4")),
        ({"replicas": 2}, ("training.replicas", 2, "value is 4", "4 devices")),
        ({"per_replica": ["*bn*", " "]}, ("training.per_replica", "'*norm*'")),
    ):
        edited = {**content, "training": {**content["training"], **changed}}
        path.write_text(json.dumps(edited))
        with refused(PlannerError, *facts):
            bind(load_plan(path), graph, SAMPLES)


def test_one_replica_is_called_so(graph: OperatorGraph) -> None:
    assert "*bn* over the samples of the only replica" in job_text(plan_of(graph, "*bn*=1", {"data": 1}))[1]


def test_a_batch_is_cut_once() -> None:
    assert parse_per_replica(["*bn*=4", "mean"]) == (("*bn*", "mean"), 4)
    with refused(RequestError, 2, 4):
        parse_per_replica(["*bn*=4", "mean=2"])


@pytest.mark.thorough
@pytest.mark.slow
def test_engines_and_strategy_files_are_not_told() -> None:
    found = planner.search(
        "llama-tiny", "h100", devices=4, seq_len=32, pinned={"data": 4}, per_replica=["*cross_entropy*"]
    )
    plan = found.plan
    assert plan.training.update.replicas == 4
    for engine in ("megatron", "torchtitan"):
        with refused(RequestError, "*cross_entropy*", "--per-replica"):
            planner.export(plan, engine)
    with refused(ExportError, "*cross_entropy*", "--per-replica"):
        planner.export(plan, "megatron", nearest=True)
    with refused(ExportError, "*cross_entropy*", "cross_batch", "--per-replica"):
        mindspore.write(found.bound)
