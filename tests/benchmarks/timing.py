"""Measures a command from outside, as its user meets it, interpreter start, imports and work together; and work inside
a process, in CPU seconds, which other work on the machine disturbs less than wall time."""

import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

# The unit of ru_maxrss, see getrusage(2): bytes on macOS, KiB elsewhere.
MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one command took: seconds on the wall, CPU seconds (user and system), peak resident bytes; what it printed,
    the last time where it ran more than once."""

    wall: float
    cpu: float
    peak_memory: int
    output: str = ""


def extent() -> str:
    """How much a benchmark was asked to do: "quick", "usual" or "full" (see run.py). Whoever asks for help is told what
    the benchmark is, and nothing runs."""
    if {"--help", "-h"}.intersection(sys.argv[1:]):
        print((sys.modules["__main__"].__doc__ or "").strip())
        raise SystemExit(0)
    asked = [word.removeprefix("--extent=") for word in sys.argv[1:] if word.startswith("--extent=")]
    return asked[-1] if asked else "usual"


def cpu_seconds(work: Callable[[], T], *, runs: int = 1) -> tuple[float, T]:
    """The median CPU seconds of several runs, and what the last one returned; without the cyclic garbage collector,
    as on the command line."""
    samples = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(runs):
            start = time.process_time()
            result = work()
            samples.append(time.process_time() - start)
    finally:
        gc.enable()
    return statistics.median(samples), result


def measure(command: Sequence[str], *, runs: int = 3) -> Measurement:
    """Run `command` several times, one after the other, and return the median of each quantity by itself.

    The kernel counts descendants that the command waited for: their CPU seconds are added, and the peak is that of
    the largest single process.

    Raises:
        RuntimeError: a run ended with an exit status other than 0; the message ends with what it wrote to stderr.
    """
    if runs < 1:
        raise ValueError(f"runs={runs}, at least 1 is needed for a median")
    samples = [_measure_once(command) for _ in range(runs)]
    return Measurement(
        wall=statistics.median(sample.wall for sample in samples),
        cpu=statistics.median(sample.cpu for sample in samples),
        peak_memory=round(statistics.median(sample.peak_memory for sample in samples)),
        output=samples[-1].output,
    )


def _measure_once(command: Sequence[str]) -> Measurement:
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as printed:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=printed, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)  # it is reaped, Popen must not wait for it again
        if process.returncode != 0:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}\n{errors.read()}")
        printed.seek(0)
        output = printed.read()
    cpu = usage.ru_utime + usage.ru_stime
    return Measurement(wall=wall, cpu=cpu, peak_memory=usage.ru_maxrss * MAXRSS_UNIT, output=output)
