"""The main job, `plan --model llama70b --devices 64`, from a cold process to the written plan."""

import sys
import tempfile
from pathlib import Path

from timing import measure

RUNS = 3
TARGET_SECONDS = 15.0
TARGET_GIBIBYTES = 1.5


def main() -> None:
    """Print the medians beside their targets; a ratio below 1 is better than the target."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["--model", "llama70b", "--devices", "64", "-o", str(Path(folder) / "plan.json")]
        measured = measure([str(Path(sys.executable).parent / "plan"), *command], runs=RUNS)
    rows = (
        ("wall", measured.wall, TARGET_SECONDS, "s"),
        ("CPU", measured.cpu, TARGET_SECONDS, "s"),
        ("peak RSS", measured.peak_memory / 2**30, TARGET_GIBIBYTES, "GiB"),
    )
    print(f"plan --model llama70b --devices 64, median of {RUNS} runs")
    print(f"{'':<10}{'measured':>10}{'target':>10}{'ratio':>8}")
    for name, value, target, unit in rows:
        print(f"{name:<10}{value:>10.2f}{target:>10.2f}{value / target:>8.2f}  {unit}")


if __name__ == "__main__":
    main()
