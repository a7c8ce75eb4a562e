"""Plans of models that people bring, trained beside the model that is not sharded."""

import os

import torch

from planner.plan.file import parse_plan
from runtime import parallelize
from runtime.launch.training import train
from runtime.processes.progress import RunSummary, StepReport
from runtime.recovery.replica_folder import FOLDER
from runtime.recovery.state_replicas import StateReplicas
from runtime.run_folder.identity import Origin
from runtime.run_settings import RunSettings
from tests.distributed.brought import fused


def difference(text: str) -> float:
    """The largest relative difference of the losses of two steps, by the tolerance of the precision."""
    plan = parse_plan(text)
    reports = list(train(plan, RunSettings(steps=2, model=plan.model.reference)))
    summary = reports[-1]
    assert isinstance(summary, RunSummary)
    assert summary.difference is not None
    return summary.difference / summary.tolerance


def saved(text: str, folder: str) -> None:
    """Train a plan for two steps and save a checkpoint."""
    plan = parse_plan(text)
    list(train(plan, RunSettings(steps=2, model=plan.model.reference, save=folder, save_every=2)))


def continued(text: str, path: str, weights: bool) -> tuple[float, float]:
    """As `difference` for one step behind a checkpoint, or with the weights of one; and the loss of that step."""
    plan = parse_plan(text)
    settings = {"weights": path, "steps": 1} if weights else {"resume": path, "steps": 3}
    reports = list(train(plan, RunSettings(model=plan.model.reference, **settings)))
    summary = reports[-1]
    assert isinstance(summary, RunSummary)
    assert summary.difference is not None
    (loss,) = (report.loss for report in reports if isinstance(report, StepReport))
    return summary.difference / summary.tolerance, loss


def replicas(first: str, then: str, folder: str) -> list[str]:
    """Keep replicas of the state after two steps of `fused` under a plan, and go on from them under another. Returns
    the weights that differ in a bit."""
    os.environ[FOLDER] = folder
    origin, trained = Origin(run="1" * 32, folder="2" * 32), []
    torch.manual_seed(0)
    _, args, _ = fused()
    for text in (first, then):
        torch.manual_seed(1)
        trained.append(parallelize(fused()[0], parse_plan(text), example=args))
    for _ in range(2):
        trained[0](*args)
    kept = StateReplicas(origin)
    kept.take(trained[0])
    left = kept.left()
    assert left is not None
    kept.restore(trained[1], left)
    weights, again = (step.full_parameters() for step in trained)
    assert weights.keys() == again.keys() == dict(fused()[0].named_parameters()).keys()
    return [name for name, weight in weights.items() if not torch.equal(weight, again[name])]
