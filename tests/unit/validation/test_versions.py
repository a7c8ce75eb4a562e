"""What frameworks did at the time of a row."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from hardware_profiles import Software, software_names
from planner.validation.frameworks.versions import VERSIONS, Version
from tests.unit.validation.runs import machine, one


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: f"{version.stacks[0]} until {version.until}")
def test_a_version_is_of_known_stacks_and_says_who_told_of_it(version: Version) -> None:
    assert set(version.stacks) <= set(software_names())
    assert set(version.changes) <= {field.name for field in fields(Software)}
    assert version.since < version.until
    assert re.search(r"[0-9a-f]{9,10}\b|Megatron-Core 0\.6", version.source)


@pytest.mark.parametrize(
    ("date", "chain"),
    [("2024", True), ("2025", False), ("2025-01", True), ("2025-02", False), ("2025-02-23", True), ("", False)],
)
def test_a_date_that_says_less_than_a_day_is_compared_as_far_as_it_goes(tmp_path: Path, date: str, chain: bool) -> None:
    assert machine(tmp_path, 3, date=date, stack="torchtitan")[0].software.foreach is chain


@pytest.mark.parametrize(
    ("date", "stack", "accumulates", "loss"),
    [
        ("2021-04", "megatron-2021", True, "in place"),
        ("2022-05", "megatron-2021", False, "in place"),
        ("2023-11", "megatron", False, "whole"),
        ("2024-06", "nemo", False, "whole"),
        ("2024-07", "megatron", False, "in place"),
    ],
)
def test_megatron_is_that_of_its_time(tmp_path: Path, date: str, stack: str, accumulates: bool, loss: str) -> None:
    software = machine(tmp_path, 1, date=date, stack=stack, flash_attention="True")[0].software
    assert (software.name, software.accumulates, software.loss) == (stack, accumulates, loss)


@pytest.mark.parametrize("date", ["June 2021", "12/2024", "24-06"])
def test_dates_that_would_be_taken_for_others_are_refused(tmp_path: Path, date: str) -> None:
    assert f"column date: '{date}' is not a date" in one(tmp_path, date=date).fault


@pytest.mark.parametrize(("date", "again"), [("2024-07", False), ("2024-07-17", True), ("2025-02", True)])
def test_nanotron_kept_what_it_gathered(tmp_path: Path, date: str, again: bool) -> None:
    """Until tp_recompute_allgather."""
    cluster, notes = machine(tmp_path, other_flags="nanotron in eager PyTorch; fused RMSNorm", date=date)
    assert cluster.software.regathers == again
    assert any("kept whole" in note for note in notes) == (not again)
