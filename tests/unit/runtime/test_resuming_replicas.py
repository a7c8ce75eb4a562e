"""A run that goes on from a checkpoint of other replicas says so."""

from pathlib import Path

import pytest
import torch

import planner
import runtime
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from runtime.launch.checkpointing import RunCheckpoints
from runtime.run_settings import RunSettings
from tests.replicas import SAMPLES, batch, network

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return trace(network(), batch())


def step_of(graph: OperatorGraph, *patterns: str) -> runtime.TrainingStep:
    found = planner.search(
        graph, "cpu", devices=1, global_batch=SAMPLES, batch=SAMPLES, precision="fp32", per_replica=patterns
    )
    return runtime.parallelize(network(), found.plan, example=batch(), device=CPU)


@pytest.fixture(scope="module")
def folder(graph: OperatorGraph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    step = step_of(graph, "*norm*=4")
    step(*batch())
    checkpoints = runtime.Checkpoints(path)
    checkpoints.save(step)
    checkpoints.wait()
    checkpoints.close()
    return path


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("patterns", "weights", "words"),
    [
        (("*norm*=4",), False, ""),
        (("*norm*=2",), False, "4 replicas, and continues with *norm* over the samples of each of 2 replicas"),
        (
            (),
            False,
            "continues with every operator over the whole batch; to keep that, plan with --per-replica '*norm*=4'",
        ),
        (("*norm*=1",), False, "continues with every operator over the whole batch"),
        ((), True, ""),
    ],
)
def test_other_replicas_are_said(
    graph: OperatorGraph, folder: Path, patterns: tuple[str, ...], weights: bool, words: str
) -> None:
    where = {"weights" if weights else "resume": str(folder)}
    run = RunCheckpoints(RunSettings(steps=3, check=False, **where), lambda what: None)  # type: ignore[arg-type]
    run.restore(step_of(graph, *patterns))
    assert bool(run.notes) == bool(words)
    assert words in "".join(run.notes)
