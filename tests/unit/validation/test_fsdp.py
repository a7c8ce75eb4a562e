"""What FSDP hides, and how often compiled chains pass memory: runs that send much, and one that sends little."""

import csv
import gzip
from pathlib import Path

import pytest

from hardware_profiles import load_software
from planner.validation.evaluate import evaluate_rows
from planner.validation.rows import read_rows
from tests.benchmarks.bench_sources import RUNS as PUBLISHED
from tests.benchmarks.bench_unseen import RUNS as UNSEEN

NEAR = {"ibmblog-34b-a100": 0.1, "ibmblog-70b-a100": 0.17, "misc-0055": 0.11, "misc-0031": 0.03}
"""How far off they may be; with half of it hidden, and chains at 0.8, they were 15, 22, 15 and 6%."""


@pytest.mark.thorough
@pytest.mark.slow
def test_published_runs_under_fsdp(tmp_path: Path) -> None:
    found = {}
    for file in (PUBLISHED, UNSEEN):
        rows = list(csv.DictReader(gzip.decompress(file.read_bytes()).decode().splitlines()))
        path = tmp_path / f"{file.name}.csv"
        with path.open("w", newline="", encoding="utf-8") as target:
            writer = csv.DictWriter(target, list(rows[0]))
            writer.writeheader()
            writer.writerows(row for row in rows if row["id"] in NEAR)
        found.update({one.row.id: one.seconds_error for one in evaluate_rows(read_rows(path))})
    assert found == {name: pytest.approx(0.0, abs=most) for name, most in NEAR.items()}


def test_both_stacks_hide_as_much() -> None:
    eager, compiled = (load_software(name) for name in ("fsdp", "fsdp-compiled"))
    assert eager.hidden == compiled.hidden
    assert compiled.passes < eager.passes
