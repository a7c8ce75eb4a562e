"""A prediction beside a trace of PyTorch's profiler (`planner.plan.compare.kineto`), term by term.

What the predicted step waits for a launch is in its computation, and in a trace a gap: `rest`.
"""

from collections.abc import Mapping

from hardware_profiles import Seconds
from planner.errors import RequestError
from planner.plan.compare.kineto import TRACE_TERMS, TracedRun
from planner.plan.compare.measured import RunComparison, Term, summed
from planner.plan.plan import Plan, Prediction
from planner.plan.prediction.step import (
    AHEAD,
    BETWEEN_STAGES,
    COVERED,
    GATHERED_AHEAD,
    PIPELINE_BUBBLE,
    REDUCED_AHEAD,
    UNCOVERED,
    UNDER_EXCHANGE,
    UNDER_PRODUCTS,
)
from planner.plan.prediction.walk.stage_cost import COMMUNICATION, GATHERING, REDUCING

_PARTS: Mapping[str, str] = {
    "forward": "computation",
    "backward": "computation",
    "recomputation": "computation",
    "gradient accumulation": "computation",
    AHEAD: "computation",
    "optimizer": "update",
    COMMUNICATION: "communication",
    GATHERING: "communication",
    REDUCING: "communication",
    "gradient reduction": "communication",
    "weight gathering": "communication",
    UNCOVERED: "communication",
    REDUCED_AHEAD: "communication",
    COVERED: "communication",
    GATHERED_AHEAD: "communication",
    UNDER_PRODUCTS: "communication",
    UNDER_EXCHANGE: "communication",
    "stage transfer": "transfer",
    BETWEEN_STAGES: "transfer",
    PIPELINE_BUBBLE: "transfer",
}
"""Terms of the parts of a prediction; parts that are not here are the `rest`."""


def predicted_trace_terms(prediction: Prediction) -> dict[str, Seconds]:
    """A prediction by `TRACE_TERMS`; they sum to its step."""
    found = dict.fromkeys(TRACE_TERMS, 0.0)
    for part, seconds in prediction.time:
        found[_PARTS.get(part, "rest")] += seconds
    return found


def compare_trace(plan: Plan, run: TracedRun) -> RunComparison:
    """The plan's prediction beside a step of a trace. A trace says nothing of the peak. Raises RequestError for one of
    a run on another number of devices."""
    if run.ranks not in (None, plan.cluster.devices):
        raise RequestError(
            f"the trace is of a run with {run.ranks} ranks, and the plan is for {plan.cluster.devices} devices; give"
            " the plan that was run"
        )
    prediction = summed(plan.prediction)
    said, whole = predicted_trace_terms(prediction), run.step_seconds
    return RunComparison(
        clock="wall",
        predicted_seconds=prediction.step_seconds,
        measured_seconds=whole,
        low_seconds=prediction.low_seconds,
        high_seconds=prediction.high_seconds,
        terms=tuple(
            Term(name=name, predicted=said[name], measured=seconds, share=(said[name] - seconds) / whole)
            for name, seconds in run.terms.items()
            if said[name] or seconds
        ),
        memory=(),
        predicted_peak_bytes=prediction.peak_bytes,
        measured_peak_bytes=None,
        peak_kind="",
    )
