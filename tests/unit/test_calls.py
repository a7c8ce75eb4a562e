"""Numbers of Python calls against their references, as `make bench ONLY=main_job` compares them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from bench_main_job import QUICK
from calls import references, regressions, unknown


def test_only_what_grew_by_more_than_a_tenth_is_told() -> None:
    known = {"llama8b on 8": 1000, "llama70b on 64": 2000}
    assert regressions({"llama8b on 8": 1100, "llama70b on 64": 500, "vit-b16 on 8": 1}, known) == []
    (line,) = regressions({"llama8b on 8": 1101, "llama70b on 64": 2000}, known)
    assert "llama8b on 8: 1,101 Python calls, 10% more than the 1,000" in line


def test_a_problem_without_a_reference_is_told() -> None:
    (line,) = unknown({"llama8b on 8": 1000, "vit-b16 on 8": 1}, {"llama8b on 8": 1000})
    assert "vit-b16 on 8" in line
    assert not unknown(dict.fromkeys((problem.name for problem in QUICK), 1), references())
