"""The main job, `plan --model llama70b --devices 64`, and others like it, from a cold process to the plan that is
written: seconds, memory, and Python calls, which are compared with references (`calls.py`).

A first run traces the model and keeps its graph, in a folder of this benchmark; what is measured are the runs after it.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from calls import references, regressions, unknown, write
from timing import Measurement, extent, measure

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is planned, for so many devices of the default hardware, and what it may take: CPU seconds, GiB."""

    model: str
    devices: int
    seconds: float
    memory: float = 1.5
    samples: int | None = None

    @property
    def name(self) -> str:
        return f"{self.model} on {self.devices}" + (f", {self.samples} samples" if self.samples else "")

    @property
    def words(self) -> list[str]:
        batch = ["--global-batch", str(self.samples)] if self.samples else []
        return ["--model", self.model, "--devices", str(self.devices), *batch]


QUICK = (Problem(model="llama70b", devices=64, seconds=6.0), Problem(model="llama8b", devices=8, seconds=4.0))
USUAL = (
    *QUICK,
    Problem(model="mixtral-8x7b", devices=512, seconds=8.0),
    Problem(model="llama70b", devices=4096, seconds=20.0),
    Problem(model="resnet152", devices=64, seconds=20.0, memory=2.0, samples=256),
)
FULL = (
    *USUAL,
    Problem(model="llama405b", devices=16384, seconds=10.0),
    Problem(model="deepseek-v3", devices=2048, seconds=15.0),
)
PROBLEMS = {"quick": QUICK, "usual": USUAL, "full": FULL}


def search_seconds(measured: Measurement) -> float | None:
    """What the command says about its search, the last time that it ran."""
    found = json.loads(measured.output).get("search", {}).get("search_seconds")
    return None if found is None else float(found)


def calls_of(words: list[str]) -> int:
    """Python calls of one run, whose hashes are those of every other."""
    done = subprocess.run(
        [sys.executable, str(HERE / "counted_calls.py"), *words, "-q"],
        env={**os.environ, "PYTHONHASHSEED": "0"}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return int(done.stdout.split()[-1])


def report(problem: Problem, runs: int) -> int:
    """Print the medians beside their targets, a ratio below 1 is better than the target; returns the calls."""
    plan = str(Path(sys.executable).parent / "plan")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [*problem.words, "--graph-cache", str(folder / "graphs"), "-o", str(folder / "plan.json")]
        first = measure([plan, *words, "--json"], runs=1)
        measured = measure([plan, *words, "--json"], runs=runs)
        calls = calls_of(words)
    rows = [
        ("CPU", measured.cpu, problem.seconds, "s"),
        ("wall", measured.wall, None, "s"),
        ("search", search_seconds(measured), None, "s"),
        ("first run", first.cpu, None, "CPU s, with tracing"),
        ("peak RSS", measured.peak_memory / 2**30, problem.memory, "GiB"),
        ("of first", first.peak_memory / 2**30, problem.memory, "GiB"),
    ]
    print(f"plan {' '.join(problem.words)}, median of {runs} {'run' if runs == 1 else 'runs'} (search: the last one)")
    print(f"{'':<10}{'measured':>10}{'target':>10}{'ratio':>8}")
    for row, value, target, unit in rows:
        if value is None:
            print(f"{row:<10}{'not told':>10}")
        elif target is None:
            print(f"{row:<10}{value:>10.2f}{'-':>10}{'-':>8}  {unit}")
        else:
            print(f"{row:<10}{value:>10.2f}{target:>10.2f}{value / target:>8.2f}  {unit}")
    print(f"{'calls':<10}{calls / 1e6:>10.2f}{'-':>10}{'-':>8}  million\n", flush=True)
    return calls


def main() -> None:
    """Print a table for each problem; ends with an error where calls regress."""
    runs = 3 if extent() == "full" else 1
    counted = {problem.name: report(problem, runs) for problem in PROBLEMS[extent()]}
    if "--write-calls" in sys.argv:
        write(counted)
        return
    print("".join(f"{line}\n" for line in unknown(counted, references())), end="")
    if worse := regressions(counted, references()):
        raise SystemExit("\n".join(worse))


if __name__ == "__main__":
    main()
