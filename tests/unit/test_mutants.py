"""Seeded faults of `make bench ONLY=mutants`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from bench_mutants import MUTANTS, ROOT


def test_every_seeded_fault_has_its_text_once_in_the_sources() -> None:
    lost = [(one.path, one.before) for one in MUTANTS if (ROOT / one.path).read_text().count(one.before) != 1]
    assert not lost
