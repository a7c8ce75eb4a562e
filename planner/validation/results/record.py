"""Errors on measured runs as the package records them: a row for each machine, shown by `plan profiles NAME --fit`."""

from collections.abc import Sequence

from hardware_profiles import RunError
from planner.validation.results.evaluated import Evaluated
from planner.validation.results.summary import summarise


def run_errors(results: Sequence[Evaluated], runs: str, date: str) -> tuple[RunError, ...]:
    """One record for each profile with an evaluated row, sorted by name.

    `runs` is the name of the file of runs, `date` is today in ISO form.
    """
    groups: dict[str, list[Evaluated]] = {}
    for result in results:
        if result.error is None:
            groups.setdefault(result.row.text("profile"), []).append(result)
    return tuple(_run_error(name, groups[name], runs, date) for name in sorted(groups))


def _run_error(profile: str, results: Sequence[Evaluated], runs: str, date: str) -> RunError:
    summary = summarise(results)
    seconds, memory = summary.whole.seconds, summary.whole.memory
    return RunError(
        profile=profile,
        rows=summary.whole.evaluated,
        timed=seconds.count,
        mean_absolute=seconds.mean_absolute,
        bias=seconds.bias,
        median_tau=summary.median_tau,
        with_memory=memory.count,
        memory_mean_absolute=memory.mean_absolute,
        memory_bias=memory.bias,
        date=date,
        runs=runs,
    )
