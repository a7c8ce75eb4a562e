"""The main job, `plan --model llama70b --devices 64`, and the same for 4,096 devices, from a cold process to the plan
that is written."""

import json
import sys
import tempfile
from pathlib import Path

from timing import Measurement, extent, measure

GIBIBYTES = 1.5  # peak memory, whatever the devices

# Devices: seconds in all, seconds of that for the search (None: no target of its own).
TARGETS: dict[int, tuple[float, float | None]] = {64: (8.0, 3.0), 4096: (20.0, None)}


def search_seconds(measured: Measurement) -> float | None:
    """What the command says about its search, the last time that it ran."""
    found = json.loads(measured.output).get("search", {}).get("search_seconds")
    return None if found is None else float(found)


def report(devices: int, runs: int) -> None:
    """Print the medians beside their targets; a ratio below 1 is better than the target."""
    plan = str(Path(sys.executable).parent / "plan")
    job = ["--model", "llama70b", "--devices", str(devices)]
    with tempfile.TemporaryDirectory() as folder:
        measured = measure([plan, *job, "--json", "-o", str(Path(folder) / "plan.json")], runs=runs)
    seconds, searching = TARGETS[devices]
    rows = [
        ("wall", measured.wall, seconds, "s"),
        ("CPU", measured.cpu, seconds, "s"),
        ("search", search_seconds(measured), searching, "s"),
        ("peak RSS", measured.peak_memory / 2**30, GIBIBYTES, "GiB"),
    ]
    print(f"plan {' '.join(job)}, median of {runs} {'run' if runs == 1 else 'runs'} (search: the last one)")
    print(f"{'':<10}{'measured':>10}{'target':>10}{'ratio':>8}")
    for name, value, target, unit in rows:
        if value is None:
            print(f"{name:<10}{'not told':>10}")
        elif target is None:
            print(f"{name:<10}{value:>10.2f}{'-':>10}{'-':>8}  {unit}")
        else:
            print(f"{name:<10}{value:>10.2f}{target:>10.2f}{value / target:>8.2f}  {unit}")
    print(flush=True)


def main() -> None:
    """Print a table for each number of devices."""
    runs = 1 if extent() == "quick" else 3
    for devices in TARGETS:
        report(devices, runs)


if __name__ == "__main__":
    main()
