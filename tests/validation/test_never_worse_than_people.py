"""The plan that the search finds is never worse, by our own estimate, than the configurations that people published.

A few of the runs of tests/benchmarks/data/training_runs.csv, whose README names the sources; `make bench ONLY=people`
does more of them and prints the ratios. Both sides are the planner's estimates: nothing here says how good these are.
"""

import pytest

from tests.benchmarks.people import Job, Run, load_runs, planned, space_of

RUNS = {run.id: run for run in load_runs()}

# Runs of one job each: with and without sequence parallelism; many degrees of one small model; fully sharded data
# parallelism; of larger searches, stages and tensors against each other, and virtual stages.
JOBS = (
    ("korth-0001", "korth-0002"),
    ("vtrain-0142", "vtrain-0363", "vtrain-0670", "vtrain-1435"),
    ("mosaic-0104",),
    pytest.param(("flagperf-0001", "flagperf-0003", "flagperf-0006"), marks=pytest.mark.thorough),
    pytest.param(("mindspeed-0077",), marks=pytest.mark.thorough),
)


def test_the_file_holds_what_its_columns_promise() -> None:
    assert len(RUNS) == 1205
    for run in RUNS.values():
        pinned = run.pinned
        assert pinned.pipeline is not None
        assert pinned.data is not None
        assert pinned.tensor is not None
        assert pinned.pipeline * pinned.data * pinned.tensor == run.job.devices, run.id
        assert pinned.recompute in ("none", "selective", "full"), run.id
        assert run.job.model.hidden % run.job.model.heads == 0, run.id
        assert run.step_seconds is None or run.step_seconds > 0, run.id


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("names", JOBS, ids=lambda names: names[0])
def test_found_is_no_slower_than_entered(names: tuple[str, ...]) -> None:
    runs = tuple(RUNS[name] for name in names)
    job = only_job(runs)
    found = planned(job, space_of(runs)).plans[0].seconds
    for run in runs:
        seconds = planned(job, run.pinned).plans[0].seconds
        assert found <= seconds * (1 + 1e-9), run.id


def only_job(runs: tuple[Run, ...]) -> Job:
    (job,) = {run.job for run in runs}
    return job
