"""`planner.compare_measured`: a plan beside one measurement of it, a record, the log of an engine, or a trace."""

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from hardware_profiles import Machine, Seconds, clusters_of_ranks
from hardware_profiles.nicknames import full_profile
from hardware_profiles.run_record import MeasuredRun, load_run_record, middle_half
from planner.api.checks import profile, public, word
from planner.api.planned import PlanOrPath, loaded, planned_model
from planner.errors import ModelError, RequestError
from planner.plan.binding.machine import machine_of
from planner.plan.compare.classes import ClassTime, class_times
from planner.plan.compare.measured import Clock, RunComparison, compare_run, summed
from planner.plan.plan import Plan

if TYPE_CHECKING:
    from planner.plan.binding.model_of import PlannedModel
    from planner.plan.compare.kineto import TracedClass
    from planner.plan.compare.training_log import LoggedRun
    from planner.validation.reading.cells import PeakKind

Classes: TypeAlias = Callable[[], dict[str, Seconds]]
"""Predicts the seconds of a step by operator class."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a plan is compared with: the file of a record, of the log of an engine, or of a trace."""

    record: Path | None = None
    log: Path | None = None
    engine: str | None = None
    trace: Path | None = None
    clock: Clock = "wall"


@dataclass(frozen=True, kw_only=True)
class MeasuredComparison:
    """A plan beside a measurement of it.

    Attributes:
        compared: seconds of the step and of its parts, bytes of memory: predicted, measured, and the error.
        flops: TFLOP/s per device, predicted and logged.
        classes: seconds by operator class, of a profiler.
        collectives: those of a trace.
        steps: number of measured steps.
        steps_words: how the measured step is made from them.
    """

    compared: RunComparison
    flops: tuple[float, float] | None = None
    classes: tuple[ClassTime, ...] = ()
    collectives: "tuple[TracedClass, ...]" = ()
    steps: int
    steps_words: str

    @property
    def error(self) -> float:
        """Predicted over measured step time, less 1."""
        return self.compared.error

    def __repr__(self) -> str:
        here, there = self.compared.predicted_seconds, self.compared.measured_seconds
        return f"MeasuredComparison({here:.3g} s predicted, {there:.3g} s measured, {self.error:+.1%})"

    def _repr_html_(self) -> str:
        from planner.report.notebook import rows_html

        return rows_html(self.to_rows())

    def to_rows(self) -> list[dict[str, object]]:
        """For pandas: the parts of the step in seconds, and at last the step; `share` of the error in the step."""
        parts = [
            {"name": one.name, "predicted_seconds": one.predicted, "measured_seconds": one.measured, "share": one.share}
            for one in self.compared.terms
        ]
        whole = {
            "name": "step",
            "predicted_seconds": self.compared.predicted_seconds,
            "measured_seconds": self.compared.measured_seconds,
            "share": self.error,
        }
        return [*parts, whole]


@public
def compare_measured(
    plan: PlanOrPath,
    record: str | os.PathLike[str] | None = None,
    *,
    log: str | os.PathLike[str] | None = None,
    engine: str | None = None,
    trace: str | os.PathLike[str] | None = None,
    clock: Clock = "wall",
    model: str | None = None,
    hardware: str | os.PathLike[str] | None = None,
) -> MeasuredComparison:
    """Compare a plan with one measurement of it, as `plan compare PLAN RECORD`. The parts of a step sum to it on both
    sides, so their errors sum to the error of the step.

    Args:
        plan: a Plan, or the path of its file.
        record: what `plan run --measure` wrote.
        log, engine: in place of a record the log of an engine, "megatron", "nemo" or "torchtitan".
        trace: in place of a record a trace of torch.profiler, JSON or gzip.
        clock: "wall", or "cpu" for the record of processes that share cores.
        model: the model, where the plan does not carry it; without it there are no predicted operator classes.
        hardware: TOML file of the plan's profile, if it is not a packaged one.

    Raises:
        RequestError: unless exactly one measurement is given, for one of another plan, and for one that cannot be read.
        PlanFileError: for a file that is no plan.
        ModelError: where `model` is given and cannot be found.
    """
    word("clock", clock, ("wall", "cpu"))
    found, at = loaded(plan), None if hardware is None else full_profile(profile(hardware))
    of_record, of_log, of_trace = (None if one is None else Path(one) for one in (record, log, trace))
    measured = Measurement(record=of_record, log=of_log, engine=engine, trace=of_trace, clock=clock)

    def classes() -> dict[str, Seconds]:
        asked = model is not None
        return classes_of(found, at, lambda: planned_model(found, model), named=asked, mean=of_record is not None)

    return compared_with(found, measured, at, classes)


def compared_with(plan: Plan, measured: Measurement, hardware: str | None, classes: Classes) -> MeasuredComparison:
    """A plan beside a measurement; `classes` predicts its operator classes where they are measured. Raises
    RequestError unless there is exactly one measurement."""
    record, log, trace = measured.record, measured.log, measured.trace
    if sum(one is not None for one in (record, log, trace)) != 1 or (log is None) != (measured.engine is None):
        raise RequestError(
            "give the plan and one measurement: a record of plan run --measure, --log FILE with --from ENGINE, or"
            " --trace FILE"
        )
    if measured.clock != "wall" and record is None:
        raise RequestError(
            f"--clock {measured.clock}: logs and traces have no CPU seconds; leave it out, or give a record"
        )
    if record is not None:
        return _recorded(plan, record, measured.clock, classes)
    if trace is not None:
        return _traced(plan, trace, classes)
    assert log is not None
    assert measured.engine is not None
    return _logged(plan, log, measured.engine, hardware)


def _recorded(plan: Plan, record: Path, clock: Clock, classes: Classes) -> MeasuredComparison:
    run = load_run_record(record)
    compared = compare_run(plan, run, clock)
    said = classes() if run.operators else {}
    return MeasuredComparison(
        compared=compared,
        classes=class_times(said, run.operators),
        steps=len(middle_half(run.step_seconds)),
        steps_words=_recorded_steps(run),
    )


def _recorded_steps(run: MeasuredRun) -> str:
    """How the measured step is made from a record, and the median that `plan run` shows."""
    from planner.report.units import seconds_text

    ends = (seconds_text(seconds) for seconds in (min(run.step_seconds), max(run.step_seconds)))
    return (
        f"Measured: mean of {len(middle_half(run.step_seconds))} of {len(run.step_seconds)} steps, the middle half by"
        f" step time. All steps: {' to '.join(ends)}, median {seconds_text(statistics.median(run.step_seconds))}."
    )


def _traced(plan: Plan, trace: Path, classes: Classes) -> MeasuredComparison:
    """A trace compared with its plan."""
    from planner.plan.compare.kineto import read_trace
    from planner.plan.compare.traced import compare_trace

    run = read_trace(trace)
    seconds = {one.name: one.seconds for one in run.kernels}
    calls = {one.name: one.calls for one in run.kernels}
    return MeasuredComparison(
        compared=compare_trace(plan, run),
        classes=class_times(classes(), seconds, calls),
        collectives=run.collectives,
        steps=run.steps,
        steps_words=f"Measured: mean of {run.steps} step{'s' if run.steps > 1 else ''} of the trace.",
    )


def classes_of(
    plan: Plan,
    hardware: str | None,
    planned: "Callable[[], PlannedModel]",
    *,
    named: bool = False,
    mean: bool = False,
) -> dict[str, Seconds]:
    """Predicted seconds of a step by operator class, of the rank that computes longest or the `mean` of all pipeline
    ranks, which needs the model; empty if the model is missing. Raises ModelError for a missing model that the user has
    named."""
    from planner.plan.binding.bind import bind
    from planner.plan.compare.classes import predicted_classes

    try:
        model = planned()
    except ModelError:  # a user's own model without a graph in the plan: measured classes only
        if named:
            raise
        return {}
    return predicted_classes(bind(plan, model.graph, model.batch), _machine(plan, hardware), mean=mean)


def _machine(plan: Plan, hardware: str | None) -> Machine:
    """The plan's machine, from the file of its profile if given. Raises RequestError for another machine: parts would
    be predicted by the plan's, operator classes by this one."""
    machine = machine_of(plan.cluster, hardware)
    if hardware is not None and (machine.name, machine.digest()) != (plan.cluster.profile, plan.cluster.digest):
        raise RequestError(
            f"--hardware {hardware} differs from the profile of the plan, '{plan.cluster.profile}' as it was when the"
            f" plan was made; give that profile, or run plan replan PLAN --hardware {hardware} -o FILE and compare FILE"
        )
    return machine


def _logged(plan: Plan, log: Path, engine: str, hardware: str | None) -> MeasuredComparison:
    """A logged run compared with its plan: step time, peak, and TFLOP/s per device."""
    from planner.plan.compare.training_log import read_log
    from planner.validation.pricing.peak import Peaks, peak_of

    run, prediction = read_log(log, engine, plan), summed(plan.prediction)
    kind: PeakKind = "allocated" if run.peak_kind == "allocated" else "reserved"
    flops = prediction.model_flops / prediction.step_seconds / plan.cluster.devices / 1e12
    devices = clusters_of_ranks(_machine(plan, hardware), plan.pipeline)
    peaks = [stage.peak_bytes for stage in prediction.stages]  # none in files of version 1
    machine = devices[peaks.index(prediction.peak_bytes) if prediction.peak_bytes in peaks else 0]
    compared = RunComparison(
        clock="wall",
        predicted_seconds=prediction.step_seconds,
        measured_seconds=run.seconds,
        low_seconds=prediction.low_seconds,
        high_seconds=prediction.high_seconds,
        terms=(),
        memory=(),
        predicted_peak_bytes=peak_of(Peaks.of(prediction), machine.device, machine.software, kind),
        measured_peak_bytes=run.peak_bytes,
        peak_kind=run.peak_kind,
    )
    return MeasuredComparison(
        compared=compared,
        flops=None if run.tflops is None else (flops, run.tflops),
        steps=len(run.step_seconds),
        steps_words=_logged_steps(run),
    )


def _logged_steps(run: "LoggedRun") -> str:
    """How the measured step is made from a log."""
    from planner.plan.compare.training_log import WARM_UP

    count = len(run.step_seconds)
    steps = f"{count} step{'s' if count > 1 else ''} of the log"
    if not run.warm:
        found = f"Measured: median of {steps}, the first ones after the start, which take longer: log more steps."
    elif run.starts > 1:
        found = f"Measured: median of {steps}, without the first {WARM_UP} after each of {run.starts} starts."
    else:
        found = f"Measured: median of {steps}, without the first {WARM_UP}."
    return f"{found} Left out: {run.others} lines of runs that differ from the plan." if run.others else found
