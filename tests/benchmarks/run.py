"""Runs the benchmarks, each in a process of its own, one after the other: `run.py [--only NAME] [--extent E]`.

A benchmark is a file `bench_NAME.py` beside this one, a script whose `main() -> None` prints its own medians.
The extent is handed on to it: "quick" is a subset of two minutes, "usual" ends within ten, "full" leaves nothing out.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PREFIX = "bench_"


def discover(folder: Path) -> dict[str, Path]:
    """The benchmarks in `folder`, by name and in the order of their names."""
    return {path.stem.removeprefix(PREFIX): path for path in sorted(folder.glob(f"{PREFIX}*.py"))}


def main() -> int:
    """Run what was asked for; the exit status is the number of benchmarks that failed."""
    benchmarks = discover(HERE)
    parser = argparse.ArgumentParser(description="Run the benchmarks.")
    parser.add_argument("--only", metavar="NAME", choices=list(benchmarks), help=f"one of: {', '.join(benchmarks)}")
    parser.add_argument("--extent", choices=("quick", "usual", "full"), default="usual")
    asked = parser.parse_args()
    failed = []
    for name in [asked.only] if asked.only else benchmarks:
        print(f"== {name} ==", flush=True)
        started = time.perf_counter()
        command = [sys.executable, str(benchmarks[name]), f"--extent={asked.extent}"]
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(name)
        print(f"({time.perf_counter() - started:.0f} s)\n", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
