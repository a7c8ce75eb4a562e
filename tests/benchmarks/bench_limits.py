"""Requests that are hard to answer, each under a limit of time: how long `plan` takes, how much memory, and what it
says. The clock of a limit starts once libraries are loaded, so what a request without work takes is printed, too."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from timing import extent

HERE = Path(__file__).resolve().parent

CASES = {
    "little to do": ("--model", "gpt-tiny", "--devices", "1"),
    "a Mamba of 1 layer, 8 tokens": ("--model", "hard_models:mamba_short", "--devices", "8"),
    "a Mamba of 2 layers, 64 tokens": ("--model", "hard_models:mamba", "--devices", "8"),
    "a Mamba of 4 layers, 512 tokens": ("--model", "hard_models:mamba_long", "--devices", "8"),
    "60 layers that read all before": ("--model", "hard_models:dense", "--devices", "64"),
    "5,000 operators in a row": ("--model", "hard_models:chain", "--devices", "8"),
    "20,000 operators in a row": ("--model", "hard_models:long_chain", "--devices", "8"),
    "tensors of 8 dims on a mesh of 3 axes": ("--model", "hard_models:dims", "--mesh", "4x8x8", "--devices", "256"),
    "a forward pass without end": ("--model", "hard_models:endless", "--devices", "8"),
    "5,040 devices": ("--model", "llama-tiny", "--devices", "5040"),
    "100,000 devices": ("--model", "llama70b", "--devices", "100000"),
    "a sequence of 10^6 tokens": ("--model", "llama-tiny", "--devices", "8", "--seq-len", "1000000"),
    "1,000 layers": ("--model", "llama-tiny", "--set", "num_layers=1000", "--devices", "64"),
    "10^6 layers": ("--model", "llama-tiny", "--set", "num_layers=1000000", "--devices", "8"),
}
LIMITS = {"quick": (5,), "usual": (10,), "full": (2, 5, 10, 30)}
ADDRESSES = 12 * 2**30
"""Bytes of address space for each run, so that this script cannot take the machine down either."""


def run(arguments: tuple[str, ...], seconds: int) -> tuple[float, float, float, str]:
    """Wall seconds, CPU seconds and peak GiB of one run, and what it said last."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).parent / "plan"), *arguments, "--time-limit", str(seconds), "--quiet"]
        command += ["-o", str(Path(folder) / "plan.json")]
        limited = ["prlimit", f"--as={ADDRESSES}", "timeout", "-s", "KILL", str(10 * seconds + 60), *command]
        started = time.monotonic()
        process = subprocess.Popen(
            limited, cwd=HERE, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, errors="replace"
        )
        assert process.stderr is not None
        said = process.stderr.read().strip().splitlines()
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - started
    code = os.waitstatus_to_exitcode(status)
    outcome = "a plan" if code == 0 else f"exit {code}: {said[-1] if said else ''}"
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20, outcome[:100]


def main() -> None:
    """Print a row for each case and limit."""
    print(f"{'request':<40}{'limit s':>8}{'wall s':>8}{'CPU s':>8}{'GiB':>7}  answer")
    for name, arguments in CASES.items():
        for seconds in LIMITS[extent()]:
            wall, cpu, memory, outcome = run(arguments, seconds)
            print(f"{name:<40}{seconds:>8}{wall:>8.1f}{cpu:>8.1f}{memory:>7.2f}  {outcome}", flush=True)


if __name__ == "__main__":
    main()
