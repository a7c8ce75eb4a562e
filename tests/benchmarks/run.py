"""Runs the benchmarks, each in a process of its own, one after the other: `run.py [--only NAME]`.

A benchmark is a file `bench_NAME.py` beside this one, a script whose `main() -> None` prints its own medians.
"""

import argparse
import subprocess
import sys
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
    only = parser.parse_args().only
    failed = []
    for name in [only] if only else benchmarks:
        print(f"== {name} ==", flush=True)
        if subprocess.run([sys.executable, str(benchmarks[name])], check=False).returncode != 0:
            failed.append(name)
        print(flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
