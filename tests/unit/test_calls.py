"""Numbers of Python calls against their references, as `make bench ONLY=main_job` compares them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from calls import references, regressions


def test_only_what_grew_by_more_than_a_tenth_is_told() -> None:
    known = {"llama8b on 8": 1000, "llama70b on 64": 2000}
    assert regressions({"llama8b on 8": 1100, "llama70b on 64": 500}, known) == []
    (line,) = regressions({"llama8b on 8": 1101, "llama70b on 64": 2000}, known)
    assert "llama8b on 8: 1,101 Python calls, 10% more than the 1,000" in line
    (line,) = regressions({"vit-b16 on 8": 1}, known)
    assert "no reference" in line


def test_every_problem_has_a_reference() -> None:
    from bench_main_job import FULL

    assert {problem.name for problem in FULL} == set(references())
