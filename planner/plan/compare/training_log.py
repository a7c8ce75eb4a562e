"""Step times, TFLOP/s and peaks of memory from the logs of other engines, line by line.

    engine       a line of a step has                             peak
    megatron     elapsed time per iteration (ms), TFLOP/s/GPU     [Rank r] max reserved, else max allocated, MiB
    nemo         train_step_timing in s, TFLOPS_per_GPU           max_memory_reserved, else _allocated, bytes
    torchtitan   tps (of a device), tflops                        memory: GiB that are reserved at most

The steps behind the first two count, in the median. Lines that say something else are left out; colours too.
"""

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hardware_profiles import Bytes, Seconds
from hardware_profiles.foreign import ForeignTextError, read_text
from hardware_profiles.units import GIB, MIB
from planner.errors import RequestError, unknown_name
from planner.plan.plan import Plan

WARM_UP = 2

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"([0-9][0-9,]*(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3})?)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """Patterns: of the time of a step with its unit in seconds, or of the tokens that a device does in a second; of
    TFLOP/s; of the global batch; of peaks, reserved and allocated, with their unit in bytes."""

    time: str = ""
    unit: float = 1.0
    rate: str = ""
    flops: str
    batch: str = ""
    reserved: str
    allocated: str = ""
    nbytes: float


_ENGINES: Mapping[str, _Engine] = {
    "megatron": _Engine(
        time=rf"elapsed time per iteration \(ms\):\s*{_NUMBER}",
        unit=1e-3,
        flops=rf"throughput per GPU \(TFLOP/s/GPU\):\s*{_NUMBER}",
        batch=rf"global batch size:\s*{_NUMBER}",
        reserved=rf"memory \(MB\).*?max reserved:\s*{_NUMBER}",
        allocated=rf"memory \(MB\).*?max allocated:\s*{_NUMBER}",
        nbytes=MIB,
    ),
    "nemo": _Engine(
        time=rf"train_step_timing in s:\s*{_NUMBER}",
        flops=rf"TFLOPS_per_GPU:\s*{_NUMBER}",
        batch=rf"global_batch_size:\s*{_NUMBER}",
        reserved=rf"max_memory_reserved:\s*{_NUMBER}",
        allocated=rf"max_memory_allocated:\s*{_NUMBER}",
        nbytes=1,
    ),
    "torchtitan": _Engine(
        rate=rf"\btps:\s*{_NUMBER}",
        flops=rf"\btflops:\s*{_NUMBER}",
        reserved=rf"\bmemory:\s*{_NUMBER}GiB",
        nbytes=GIB,
    ),
}
ENGINES = tuple(_ENGINES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """What a log says: seconds of every step, TFLOP/s of a device in the median of the same steps, and the largest
    peak with what it counts; None where nothing is said."""

    step_seconds: tuple[Seconds, ...]
    tflops: float | None
    peak_bytes: Bytes | None
    peak_kind: str

    @property
    def seconds(self) -> Seconds:
        """The median of the steps behind the warm-up."""
        return statistics.median(self.step_seconds[WARM_UP:] or self.step_seconds)


def read_log(path: Path, engine: str, plan: Plan) -> LoggedRun:
    """The run of a plan that a log of an engine tells of.

    Raises RequestError for an engine that is not known, a log without a step, and one of another global batch.
    """
    if engine not in _ENGINES:
        raise RequestError(f"--from: {unknown_name('engine', engine, ENGINES)}")
    try:
        text = _COLOURS.sub("", read_text(path))
    except ForeignTextError as error:
        raise RequestError(f"{path}: {error}; give the log of a training run") from error
    known = _ENGINES[engine]
    seconds, flops, batches = list[float](), list[float](), list[float]()
    for line in text.splitlines():
        step = _step(known, line, plan)
        if step is None:
            continue
        seconds.append(step)
        flops += _found(known.flops, line)
        batches += _found(known.batch, line)
    if not seconds:
        raise RequestError(f"{path}: no line has the time of a step as {engine} writes it; is --from {engine} right?")
    if batches and batches[-1] != plan.training.global_batch:
        raise RequestError(
            f"{path}: the global batch is {batches[-1]:g} there and {plan.training.global_batch} in the plan; give the"
            " plan that was run"
        )
    peaks = {"reserved": _found(known.reserved, text), "allocated": _found(known.allocated, text)}
    kind = next((kind for kind, found in peaks.items() if found), "")
    counted = flops[WARM_UP:] or flops
    return LoggedRun(
        step_seconds=tuple(seconds),
        tflops=statistics.median(counted) if counted else None,
        peak_bytes=max(peaks[kind]) * known.nbytes if kind else None,
        peak_kind=kind,
    )


def _step(engine: _Engine, line: str, plan: Plan) -> Seconds | None:
    """The seconds of the step that a line is of."""
    if engine.time:
        found = _found(engine.time, line)
        return found[0] * engine.unit if found and found[0] > 0 else None
    rate = _found(engine.rate, line)
    if not rate or rate[0] <= 0 or plan.model.sequence_length is None:
        return None
    return plan.training.global_batch * plan.model.sequence_length / (rate[0] * plan.cluster.devices)


def _found(pattern: str, text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(pattern, text)] if pattern else []
