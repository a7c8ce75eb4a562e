"""Step times, TFLOP/s and peaks of memory from the logs of other engines, line by line.

    engine       a line of a step has                             peak
    megatron     elapsed time per iteration (ms), TFLOP/s/GPU     [Rank r] max reserved, else max allocated, MiB
    nemo         train_step_timing in s, TFLOPS_per_GPU           max_memory_reserved, else _allocated, bytes
    torchtitan   tps (of a device), tflops                        memory: GiB that are reserved at most

    start | step 1  step 2 | step 3  step 4 ...   crash, start | step 3  step 4 | step 5 ...
          | warm-up        | count: the median               | warm-up        | count

A step that several ranks log is one. Where its number falls back the run was started again. Steps of another global
batch, sequence length or number of devices than the plan's are left out, as logs say these: one file may have several
runs. Lines that say something else are left out; colours too, and bytes that are no text, as crashes leave.
"""

import math
import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hardware_profiles import Bytes, Seconds
from hardware_profiles.foreign import ForeignTextError, read_bytes
from hardware_profiles.units import GIB, MIB
from planner.errors import RequestError, unknown_name
from planner.plan.plan import Plan

WARM_UP = 2

_LARGEST = 2**28  # bytes
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NUMBER = r"([0-9][0-9,]*(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3})?)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """Patterns: of the number of a step; of its time with its unit in seconds, or of the tokens that a device does in a
    second; of TFLOP/s; of the global batch, the sequence length and the devices of a run; of peaks, reserved and
    allocated, with their unit in bytes, in lines that have `memory` in them. Each starts with a word or where its line
    does, and takes time in proportion to its line, whatever is in it."""

    number: str
    time: str = ""
    unit: float = 1.0
    rate: str = ""
    flops: str
    batch: str
    length: str = ""
    devices: str = ""
    memory: str = ""
    reserved: str
    allocated: str = ""
    nbytes: float


_ENGINES: Mapping[str, _Engine] = {
    "megatron": _Engine(
        number=r"\biteration\s+([0-9]{1,15})\s*/",
        time=rf"elapsed time per iteration \(ms\):\s*{_NUMBER}",
        unit=1e-3,
        flops=rf"throughput per GPU \(TFLOP/s/GPU\):\s*{_NUMBER}",
        batch=rf"global batch size:\s*{_NUMBER}",
        length=rf"\bseq_length \.+ {_NUMBER}",
        devices=rf"using world size: {_NUMBER}",
        memory="memory (MB)",
        reserved=rf"max reserved:\s*{_NUMBER}",
        allocated=rf"max allocated:\s*{_NUMBER}",
        nbytes=MIB,
    ),
    "nemo": _Engine(
        number=r"\bglobal_step[:=]\s*([0-9]{1,15})",
        time=rf"train_step_timing in s[:=]\s*{_NUMBER}",
        flops=rf"TFLOPS_per_GPU:\s*{_NUMBER}",
        batch=rf"global_batch_size:\s*{_NUMBER}",
        reserved=rf"max_memory_reserved:\s*{_NUMBER}",
        allocated=rf"max_memory_allocated:\s*{_NUMBER}",
        nbytes=1,
    ),
    "torchtitan": _Engine(
        number=r"\bstep:\s*([0-9]{1,15})",
        rate=rf"^(?!.*\bvalidate step:).*\btps:\s*{_NUMBER}",
        flops=rf"\btflops:\s*{_NUMBER}",
        batch=rf"global batch size {_NUMBER}",
        length=rf"sequence length {_NUMBER}",
        reserved=rf"\bmemory:\s*{_NUMBER}GiB",
        nbytes=GIB,
    ),
}
ENGINES = tuple(_ENGINES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """What a log says: seconds of the steps that count, in how many `starts` of the run; `warm` where these are all
    behind the first two of their start, else there are no others. `others` are the steps of other runs. TFLOP/s of a
    device are the median of the same steps, and the peak is the largest, with what it counts; None where nothing is
    said."""

    step_seconds: tuple[Seconds, ...]
    warm: bool
    starts: int
    others: int
    tflops: float | None
    peak_bytes: Bytes | None
    peak_kind: str

    @property
    def seconds(self) -> Seconds:
        """The median of the steps that count."""
        return statistics.median(self.step_seconds)


@dataclass(slots=True)
class _Step:
    """What the lines of one step say, of as many ranks as log it."""

    seconds: list[Seconds] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)


def read_log(path: Path, engine: str, plan: Plan) -> LoggedRun:
    """The run of a plan that a log of an engine tells of.

    Raises RequestError for an engine that is not known, a log without a step, and one of another global batch, sequence
    length or number of devices.
    """
    if engine not in _ENGINES:
        raise RequestError(f"--from: {unknown_name('engine', engine, ENGINES)}")
    known, lines = _ENGINES[engine], _lines(path)
    if known.rate and plan.model.sequence_length is None:
        raise RequestError(f"--from {engine}: it logs tokens/s, but the model of the plan has no sequence length")
    starts, others, said = _starts(path, known, lines, plan)
    if not starts:
        raise RequestError(f"{path}: no line has a step time as {engine} writes it{_written_by(lines)}")
    behind = [step for steps in starts for step in list(steps.values())[WARM_UP:]]
    counted = behind or [step for steps in starts for step in steps.values()]
    flops = [statistics.median(step.flops) for step in counted if step.flops]
    peaks = {kind: [size for line in said for size in _found(pattern, line)] for kind, pattern in
             (("reserved", known.reserved), ("allocated", known.allocated))}  # fmt: skip
    kind = next((kind for kind, found in peaks.items() if found), "")
    return LoggedRun(
        step_seconds=tuple(statistics.median(step.seconds) for step in counted),
        warm=bool(behind),
        starts=len(starts),
        others=others,
        tflops=statistics.median(flops) if flops else None,
        peak_bytes=max(peaks[kind]) * known.nbytes if kind else None,
        peak_kind=kind,
    )


def _lines(path: Path) -> list[str]:
    try:
        content = read_bytes(path, _LARGEST)
    except ForeignTextError as error:
        raise RequestError(f"{path}: {error}; give the log of a training run, with some hundred steps") from error
    wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))
    text = content.decode("utf-16" if wide else "utf-8", errors="replace")
    return _CODES.sub("", text).splitlines()


def _starts(path: Path, engine: _Engine, lines: list[str], plan: Plan) -> tuple[list[dict[int, _Step]], int, list[str]]:
    """The steps of the plan by their numbers, one mapping for each start of the run, how many lines are of steps of
    other runs, and the lines that may have a peak of this one. Raises RequestError where all steps are of others."""
    wanted = {
        "global batch": (engine.batch, plan.training.global_batch),
        "sequence length": (engine.length, plan.model.sequence_length),
        "number of devices": (engine.devices, plan.cluster.devices),
    }
    said: dict[str, float] = {}
    starts: list[dict[int, _Step]] = []
    reports: list[str] = []
    differs, others, last = "", 0, -1
    for line in lines:
        for what, (pattern, _) in wanted.items():
            if found := _found(pattern, line):
                said[what] = found[-1]
        other = next((what for what, found in said.items() if wanted[what][1] not in (None, found)), None)
        if other is None and engine.memory in line:
            reports.append(line)
        seconds = _step(engine, line, plan)
        if seconds is None:
            continue
        if other is not None:
            differs = f"the {other} is {said[other]:g} in the log and {wanted[other][1]} in the plan"
            others += 1
            continue
        number = next((int(found) for found in re.findall(engine.number, line)), None)
        if not starts or (number is not None and number < last - 1):
            starts.append({})
            last = -1
        number = last + 1 if number is None else number
        last = max(last, number)
        step = starts[-1].setdefault(number, _Step())
        step.seconds.append(seconds)
        step.flops += _found(engine.flops, line)
    if not starts and others:
        raise RequestError(f"{path}: {differs}; give the plan that was run")
    return starts, others, reports


def _step(engine: _Engine, line: str, plan: Plan) -> Seconds | None:
    """The seconds of the step that a line is of."""
    found = next(_positive(engine.time or engine.rate, line), None)
    if found is None:
        return None
    if engine.time:
        return found * engine.unit
    assert plan.model.sequence_length is not None
    return plan.training.global_batch * plan.model.sequence_length / (found * plan.cluster.devices)


def _written_by(lines: list[str]) -> str:
    """What else to try with a log: the engine of which it has steps."""
    for name, engine in _ENGINES.items():
        if any(_found(engine.time or engine.rate, line) for line in lines):
            return f", and some have it as {name} does: --from {name}"
    return "; give the log of a training run, from the rank that writes it"


def _positive(pattern: str, text: str) -> Iterator[float]:
    return (number for number in _found(pattern, text) if number > 0)


def _found(pattern: str, text: str) -> list[float]:
    """Numbers that stand where a pattern says, those left out that are none."""
    numbers = [float(found.replace(",", "")) for found in re.findall(pattern, text)] if pattern else []
    return [number for number in numbers if math.isfinite(number)]
