"""The reports of a run: one line per step and one at its end, as objects, text and JSON.

Rank 0 starts the lines that it writes for the process that started it with a record separator (RFC 7464), so that
output of a model or a dataset is not mistaken for a report.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from hardware_profiles.foreign import ForeignTextError, Limits, parse_json
from hardware_profiles.units import GIB
from runtime.processes.stragglers import SlowRank

RECORD = "\x1e"
SCHEMA_VERSION = 1  # of the objects below as JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One batch: its number from 1, its loss, the unsharded model's loss (None where that is not run), seconds, and the
    samples and tokens trained on (no tokens for a model without sequences). `trouble` says why the batch made no step
    (the next batch then has the same number); None where it made one. `back_to` is the step to which training was
    rolled back, if it was; the next batch has the number after it."""

    step: int
    steps: int
    loss: float
    unsharded: float | None
    seconds: float
    samples: int
    tokens: int | None
    trouble: str | None = None
    back_to: int | None = None

    @property
    def difference(self) -> float:
        """Relative difference of the two losses; infinite if either is NaN, except in a step that was not made."""
        if self.unsharded is None or (self.trouble is not None and not math.isfinite(self.loss)):
            return 0.0
        return relative_difference(self.loss, self.unsharded)

    def text(self) -> str:
        beside = "" if self.unsharded is None else (
            f"   unsharded {self.unsharded:.6f}   difference {self.difference:.1e}"
        )  # fmt: skip
        return (
            f"step {self.step:>4}   loss {self.loss:.6f}{beside}   {self.seconds:.3g} s"
            f"   {rate_text(self.samples, self.tokens, self.seconds)}"
            f"{'' if self.trouble is None else f'   NO UPDATE: {self.trouble}'}"
            f"{'' if self.back_to is None else f'; rolled back to step {self.back_to}'}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """An evaluation of the model after `step` steps: the mean loss of all `batches`, the unsharded model's (None where
    that is not run), seconds, and the samples and tokens in them. `left_out` is the number of samples after the last
    whole batch; None where the dataset has no length."""

    step: int
    data: str
    loss: float
    unsharded: float | None
    seconds: float
    batches: int
    samples: int
    tokens: int | None
    left_out: int | None

    @property
    def difference(self) -> float:
        """Relative difference of the two losses; infinite if one of them is NaN; zero if both are, as when all targets
        are ignored."""
        if self.unsharded is None or (math.isnan(self.loss) and math.isnan(self.unsharded)):
            return 0.0
        return relative_difference(self.loss, self.unsharded)

    def lines(self) -> list[str]:
        """The report as text lines."""
        beside = "" if self.unsharded is None else (
            f"   unsharded {self.unsharded:.6f}   difference {self.difference:.1e}"
        )  # fmt: skip
        rest = f", {self.left_out} left out" if self.left_out else ""
        return [
            f"evaluated after step {self.step}   loss {self.loss:.6f}{beside}   {self.samples} samples{rest}"
            f"   {self.seconds:.3g} s   {rate_text(self.samples, self.tokens, self.seconds)}"
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The end of a run. `seconds` is the median of the steps after the first two, None where there are no others;
    `predicted_seconds` and its interval are the plan's, for `profile`; `elsewhere` says why that is not this machine,
    or is empty. `difference` is the largest of all steps, None where nothing was compared. `peak_bytes` has a value for
    every rank, where known, counted as `peak_kind` says. `busy_seconds` has every rank's time outside of waiting for
    others; of these, `slow` are the ranks for which others wait (`runtime.processes.stragglers`). `resumed` is the
    checkpoint from which training continued, `saved` its last one."""

    steps: int
    data: str
    seconds: float | None
    samples: int
    tokens: int | None
    predicted_seconds: float
    low_seconds: float | None
    high_seconds: float | None
    profile: str
    elsewhere: str
    peak_bytes: tuple[float, ...]
    peak_kind: str
    predicted_peak_bytes: float
    precision: str
    difference: float | None
    tolerance: float
    resumed: str | None = None
    saved: str | None = None
    busy_seconds: tuple[float, ...] = ()
    slow: tuple[SlowRank, ...] = ()

    @property
    def agrees(self) -> bool:
        return self.difference is None or self.difference <= self.tolerance

    def lines(self) -> list[str]:
        """The summary as text lines."""
        found = [f"resumed from {self.resumed}"] if self.resumed is not None else []
        found += [f"data: {self.data}", self._time(), *self._slow(), *self._memory()]
        found += [f"saved: {self.saved}"] if self.saved is not None else []
        if self.difference is not None:
            verdict = "agrees with" if self.agrees else "DIFFERS from"
            found.append(
                f"the plan {verdict} the unsharded model: largest relative difference {self.difference:.1e}, allowed"
                f" {self.tolerance:.0e} for {self.precision}"
            )
        return found

    def _time(self) -> str:
        interval = ""
        if self.low_seconds is not None and self.high_seconds is not None:
            interval = f" (80% interval {self.low_seconds:.3g} to {self.high_seconds:.3g} s)"
        predicted = f"predicted {self.predicted_seconds:.3g} s{interval} by profile {self.profile}"
        where = f"; {self.elsewhere}" if self.elsewhere else ""
        if self.steps == 0 and self.seconds is None:
            return f"no step was trained; {predicted} a step{where}"
        if self.seconds is None:
            return f"step time: not measured, which takes 3 steps or more; {predicted}{where}"
        rate = rate_text(self.samples, self.tokens, self.seconds)
        return f"step time: {self.seconds:.3g} s (median, without the first 2 steps), {rate}; {predicted}{where}"

    def _slow(self) -> list[str]:
        return [
            f"straggler: rank {one.rank} is busy for {one.seconds:.3g} s of each step, {one.times:.1f} times the median"
            " of the ranks with the same work; the others wait for it"
            for one in self.slow
        ]

    def _memory(self) -> list[str]:
        if not self.peak_bytes:
            return []
        listed = ", ".join(f"{value / GIB:.2f}" for value in self.peak_bytes)
        return [
            f"peak memory by rank ({self.peak_kind}): {listed} GiB; predicted {self.predicted_peak_bytes / GIB:.2f} GiB"
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartReport:
    """The ranks are restarted: how many times so far, after which step, on how many devices, and why."""

    restart: int
    step: int
    devices: int
    reason: str

    def lines(self) -> list[str]:
        """The report as text lines."""
        return [f"restart {self.restart} after step {self.step}, on {self.devices} devices: {self.reason}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeReport:
    """A message for the user who watches the run."""

    text: str

    def lines(self) -> list[str]:
        """The report as text lines."""
        return [f"note: {self.text}"]


_Record = (
    tuple[Literal["step"], StepReport]
    | tuple[Literal["evaluation"], EvaluationReport]
    | tuple[Literal["notice"], NoticeReport]
    | tuple[Literal["summary"], RunSummary]
)
_LIMITS = Limits(size=2**24, finite=False)  # of a line: it has the memory of every rank, and losses may be NaN

Report = StepReport | EvaluationReport | RunSummary | RestartReport | NoticeReport


def relative_difference(loss: float, unsharded: float) -> float:
    """The relative difference of two losses; infinite where one of them is NaN."""
    relative = abs(loss - unsharded) / max(abs(unsharded), 1e-12)
    return relative if relative == relative else math.inf


def rate_text(samples: int, tokens: int | None, seconds: float) -> str:
    """Tokens per second, or samples per second where there are no tokens."""
    count, name = (samples, "samples/s") if tokens is None else (tokens, "tokens/s")
    return f"{count / max(seconds, 1e-9):,.4g} {name}"


def _kind(report: Report) -> str:
    kinds = {
        StepReport: "step",
        EvaluationReport: "evaluation",
        RunSummary: "summary",
        RestartReport: "restart",
        NoticeReport: "notice",
    }
    return kinds[type(report)]


def lines_of(report: Report) -> list[str]:
    """A report as plain lines."""
    return [report.text()] if isinstance(report, StepReport) else report.lines()


def content_of(report: Report) -> dict[str, Any]:
    """A report as one JSON object; numbers that are not finite become null."""
    content = {"schema_version": SCHEMA_VERSION, "event": _kind(report), **asdict(report)}
    if isinstance(report, RunSummary):
        content["agrees"] = report.agrees if report.difference is not None else None
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in content.items()
    }


def record_of(report: Report) -> str:
    """A report as a marked line, for the process that started the ranks."""
    return RECORD + json.dumps([_kind(report), asdict(report)])


def report_of(line: str) -> Report | None:
    """The report in a marked line; None for any other line, also if a model printed it after the mark."""
    if not line.startswith(RECORD):
        return None
    try:
        content = parse_json(line.removeprefix(RECORD), _LIMITS)
        return TypeAdapter(_Record).validate_python(content)[1]
    except (ForeignTextError, ValidationError):
        return None


def reading(on_report: Callable[[Report], None], on_line: Callable[[str], None]) -> Callable[[str], None]:
    """A handler for the lines of the ranks: reports go to the first function, all others to the second."""

    def read(line: str) -> None:
        report = report_of(line)
        if report is None:
            on_line(line)
        else:
            on_report(report)

    return read
