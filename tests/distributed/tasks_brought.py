"""Plans of models that people bring, trained beside the model that is not sharded."""

from planner.plan.file import parse_plan
from runtime.launch.training import train
from runtime.processes.progress import RunSummary, StepReport
from runtime.run_settings import RunSettings


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
