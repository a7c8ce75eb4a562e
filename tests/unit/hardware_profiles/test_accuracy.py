"""The tables of recorded errors: they read back, keep what is not told anew, and refuse what they are not."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hardware_profiles import (
    FitError,
    MeasurementsError,
    RunError,
    dump_records,
    profile_names,
    recorded,
    with_records,
)
from tests.refusals import refused

RUN = RunError(
    profile="b",
    rows=3,
    timed=2,
    mean_absolute=0.25,
    bias=-0.125,
    median_tau=None,
    with_memory=0,
    memory_mean_absolute=None,
    memory_bias=None,
    date="2026-11-20",
    runs="runs.csv",
)
COLUMNS = dump_records(RunError, [RUN]).splitlines()[0]


def test_the_packaged_tables_speak_of_packaged_profiles() -> None:
    fits, runs = recorded(FitError), recorded(RunError)
    assert {one.profile for one in (*fits, *runs)} <= set(profile_names())
    assert {"matmul bf16", "attention bf16", "collectives in a node"} <= {one.part for one in fits}
    assert len({one.profile for one in runs}) == len(runs) > 0
    assert len({(one.profile, one.part) for one in fits}) == len(fits)


def test_a_table_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "errors.csv"
    path.write_text(dump_records(RunError, [RUN]))
    assert recorded(RunError, path) == (RUN,)


def test_what_is_not_told_anew_stays() -> None:
    other, newer = replace(RUN, profile="a"), replace(RUN, rows=4)
    assert with_records([RUN, other], [newer]) == (other, newer)
    parts = [
        FitError(profile="a", part=part, rows=1, mean_absolute=0.1, bias=0.0, date="2026-11-20", source="table")
        for part in ("x", "y")
    ]
    assert with_records(parts, parts[1:]) == (parts[1],)


@pytest.mark.parametrize(
    ("edit", "facts"),
    [
        (lambda text: text.replace("profile,rows", "rows,profile"), ("line 1", COLUMNS)),
        (lambda text: text.replace("b,3", "b,many"), ("line 2", "rows")),
        (lambda text: text.replace("b,3", "b,"), ("line 2", "rows")),
        (lambda text: text.replace("0.2500", "nan"), ("line 2", "mean_absolute")),
        (lambda text: text + "c,1\n", ("line 3", 2, 11)),
        (lambda text: "", ("line 1", COLUMNS)),
    ],
)
def test_other_files_are_refused(tmp_path: Path, edit: object, facts: tuple[object, ...]) -> None:
    path = tmp_path / "errors.csv"
    path.write_text(edit(dump_records(RunError, [RUN])))  # type: ignore[operator]
    with refused(MeasurementsError, path, *facts):
        recorded(RunError, path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with refused(MeasurementsError, tmp_path / "none.csv", os.strerror(errno.ENOENT)):
        recorded(RunError, tmp_path / "none.csv")
