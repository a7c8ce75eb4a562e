"""Plans of models that people bring, trained beside the model that is not sharded."""

from planner.plan.file import parse_plan
from runtime.launch.training import train
from runtime.processes.progress import RunSummary
from runtime.run_settings import RunSettings


def difference(text: str) -> float:
    """The largest relative difference of the losses of two steps, by the tolerance of the precision."""
    plan = parse_plan(text)
    reports = list(train(plan, RunSettings(steps=2, model=plan.model.reference)))
    summary = reports[-1]
    assert isinstance(summary, RunSummary)
    assert summary.difference is not None
    return summary.difference / summary.tolerance
