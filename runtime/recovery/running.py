"""A run on this machine that continues after failures, and on as many devices as there are."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from planner.plan.plan import Plan
from runtime.checkpoint.folder import newest, step_of
from runtime.processes.progress import Report, reading
from runtime.processes.ranks import run_ranks
from runtime.processes.run_servers import servers_of
from runtime.recovery.replanning import PLANS, Plans, range_of
from runtime.recovery.supervisor import Attempt, Supervisor
from runtime.run_settings import RunSettings

ELASTIC_RESTARTS = 3
"""The default number of consecutive failures without a step that an elastic run tolerates."""


def run_on_and_on(
    path: Path,
    plan: Plan,
    settings: RunSettings,
    on_report: Callable[[Report], None],
    on_line: Callable[[str], None],
) -> int:
    """Run the ranks of a plan until all steps are done, and restart them when they fail or devices come and go; returns
    the exit code. `settings.save` has the checkpoints from which they continue; the caller holds its lock.

    Raises PlannerError as `run_ranks` does, and RunError after too many failures.
    """
    assert settings.save is not None
    folder, restarts = Path(settings.save), settings.restarts
    plans = None
    if settings.elastic is not None:
        plans = Plans(plan, folder / PLANS, range_of(settings.elastic), settings.model)
        restarts = ELASTIC_RESTARTS if restarts is None else restarts
    before = newest(folder)

    def start(attempt: Attempt) -> int:
        last = newest(folder)
        if last is not None and step_of(last) >= settings.steps and last != before:
            return 0  # it failed after its last step
        given = settings if attempt.first else replace(settings, go_on=True)  # else from its configured start
        with servers_of(attempt.plan, settings) as found:
            words = [str(attempt.path or path), *replace(given, server_folder=found).arguments()]
            return run_ranks("runtime", words, attempt.plan.cluster.devices, read, settings.timeout, attempt.leave)

    supervisor = Supervisor(
        start=start, plan=plan, steps=settings.steps, restarts=restarts or 0, tell=on_report, plans=plans, folder=folder
    )

    def see(report: Report) -> None:
        supervisor.see(report)
        on_report(report)

    read = reading(see, on_line)
    return supervisor.run()
