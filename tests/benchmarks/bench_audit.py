"""How long `plan audit` takes for the plan of Llama 70B on 64 H100, start of the interpreter and tracing included."""

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from timing import extent

import planner
from planner.plan.file import save_plan

MODEL, DEVICES = "llama70b", 64
ROUNDS = {"quick": 1, "usual": 3, "full": 5}


def main() -> None:
    found = planner.search(MODEL, "h100-80gb", devices=DEVICES)
    mesh = "x".join(map(str, found.plan.mesh.sizes))
    stages = len(found.plan.stages)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "plan.json"
        save_plan(found.plan, path)
        rounds = [_audit(path) for _ in range(ROUNDS[extent()])]
    verdict = rounds[0][2]
    wall, cpu = (statistics.median(column) for column in list(zip(*rounds, strict=True))[:2])
    print(
        f"{MODEL} on {DEVICES} devices: mesh {mesh}, {stages} stages, {found.plan.training.micro_batches} micro-batches"
    )
    print(f"plan audit: {wall:.1f} s on the wall, {cpu:.1f} CPU seconds; median of {len(rounds)}")
    print(verdict)


def _audit(path: Path) -> tuple[float, float, str]:
    """Seconds on the wall, CPU seconds, and what it ends with."""
    started, before = time.perf_counter(), _children()
    command = [sys.executable, "-m", "planner.cli.main", "audit", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return time.perf_counter() - started, _children() - before, done.stdout.strip().splitlines()[-1]


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
