"""Numbers of Python calls that the main job has taken, and whether it takes more now.

`calls.json` beside this file has them by problem. A number that grew by more than `ALLOWED` fails the benchmark; who
means it, or has made something quicker, writes new ones, and the commit says why:

    python tests/benchmarks/bench_main_job.py --write-calls
"""

import json
from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).resolve().parent / "calls.json"
ALLOWED = 0.1
"""Share by which a number may grow: versions of libraries differ by some percent."""


def references() -> dict[str, int]:
    """Calls by problem, as they were written."""
    found: dict[str, int] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def unknown(counted: Mapping[str, int], known: Mapping[str, int]) -> list[str]:
    """A line for each problem that has no reference."""
    return [
        f"{problem}: {calls:,} Python calls, and calls.json has no reference; write one with --write-calls"
        for problem, calls in counted.items()
        if problem not in known
    ]


def regressions(counted: Mapping[str, int], known: Mapping[str, int]) -> list[str]:
    """A line for each problem that takes more calls than are allowed."""
    lines = []
    for problem, calls in counted.items():
        if problem in known and calls > known[problem] * (1 + ALLOWED):
            more = calls / known[problem] - 1
            lines.append(
                f"{problem}: {calls:,} Python calls, {more:.0%} more than the {known[problem]:,} of calls.json"
                f" ({ALLOWED:.0%} are allowed); find out why, or write new references with --write-calls"
            )
    return lines


def write(counted: Mapping[str, int]) -> None:
    """Take these as references; those of other problems stay."""
    merged = {**references(), **counted}
    FILE.write_text(json.dumps(dict(sorted(merged.items())), indent=2) + "\n", encoding="utf-8")
