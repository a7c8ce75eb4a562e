"""A prediction beside what was measured of the same plan, term by term.

    term           predicted   measured   of the error of the step
    forward        f           F          (f - F) / step            terms sum to the step on both sides, so that
    ...                                                             the last column sums to the error of the step

Measured terms are those of the pipeline stage that is busy longest, in the mean of its ranks, as the prediction has the
busiest stage. By the clock of the CPU (`clock="cpu"`) the terms in which a rank computes are the CPU seconds of
the thread that computes: on a machine that others use they say what the work takes, and not how long it stood in line.
Waiting is then what the rank that computes most takes more than the mean: by the wall ranks also wait for one that
stood in line.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from hardware_profiles import Bytes, Seconds
from hardware_profiles.run_record import TERMS, MeasuredRun, RankTerms, RunPlan
from planner.errors import RequestError
from planner.plan.file import plan_content
from planner.plan.plan import SLACK, Plan, Prediction
from planner.plan.prediction.step import (
    AHEAD,
    BETWEEN_STAGES,
    COVERED,
    GATHERED_AHEAD,
    REDUCED_AHEAD,
    UNCOVERED,
    UNDER_EXCHANGE,
    UNDER_PRODUCTS,
)
from planner.plan.prediction.walk.stage_cost import GATHERING, REDUCING
from planner.plan.schema import PlanFile, validated

Clock: TypeAlias = Literal["wall", "cpu"]

_PARTS: Mapping[str, str] = {
    "forward": "forward",
    "backward": "backward",
    "recomputation": "backward",
    "gradient accumulation": "backward",
    "communication": "communication",
    GATHERING: "communication",
    COVERED: "communication",
    GATHERED_AHEAD: "communication",
    UNDER_EXCHANGE: "communication",
    UNDER_PRODUCTS: "communication",
    REDUCING: "communication",
    "stage transfer": "transfer",
    BETWEEN_STAGES: "transfer",
    "pipeline bubble": "transfer",
    "optimizer": "update",
    "gradient reduction": "reduction",
    REDUCED_AHEAD: "reduction",
    "weight gathering": "reduction",
}
"""Terms of the parts of a prediction; parts that are not here are the `rest`."""

WRONG = 0.1
"""A term is wrong where it is off by more than that of itself, and by more than `COUNTS` of the step."""

COUNTS = 0.02

_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One term: what is predicted and measured, in seconds or bytes; `share` is the difference by the measured whole,
    positive where too much is predicted."""

    name: str
    predicted: float
    measured: float
    share: float

    @property
    def wrong(self) -> bool:
        """Whether it is far off and counts."""
        return abs(self.share) > COUNTS and abs(self.predicted - self.measured) > WRONG * self.measured


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """A run beside its prediction. `error` is that of the step, relative; `inside` whether the measured step lies in
    the interval of the prediction, None where it has none. `memory` has the classes whose bytes were counted."""

    clock: Clock
    predicted_seconds: Seconds
    measured_seconds: Seconds
    low_seconds: Seconds | None
    high_seconds: Seconds | None
    terms: tuple[Term, ...]
    memory: tuple[Term, ...]
    predicted_peak_bytes: Bytes
    measured_peak_bytes: Bytes | None
    peak_kind: str

    @property
    def error(self) -> float:
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def inside(self) -> bool | None:
        if self.low_seconds is None or self.high_seconds is None:
            return None
        return self.low_seconds <= self.measured_seconds <= self.high_seconds

    @property
    def wrong(self) -> tuple[Term, ...]:
        """Terms that are wrong, the largest share of the error first."""
        return tuple(sorted((one for one in self.terms if one.wrong), key=lambda one: -abs(one.share)))


def summed(prediction: Prediction) -> Prediction:
    """A prediction whose parts sum to its step. Raises RequestError for one that was edited, so that they do not."""
    parts = sum(seconds for _, seconds in prediction.time)  # infinite where fsum raises
    if not math.isclose(parts, prediction.step_seconds, rel_tol=_ROUNDING):
        raise RequestError(
            f"the prediction in the plan file was edited: its parts sum to {parts:.6g} s, but step_seconds is"
            f" {prediction.step_seconds:.6g}; undo the edit (plan verify prices the plan anew)"
        )
    return prediction


def predicted_terms(prediction: Prediction) -> dict[str, Seconds]:
    """A prediction by the terms of a record; they sum to its step. What computation takes longer beside collectives
    that occupy a part of its device is in those of the collectives, as in the parts of the prediction. What a host
    saves that launches ahead is taken from both passes."""
    found = dict.fromkeys(TERMS, 0.0)
    parts, said = dict(_PARTS), {part for part, _ in prediction.time}
    if REDUCED_AHEAD in said:  # what is left of buckets is waited for at the end
        parts[UNCOVERED] = "reduction"
    elif said & {GATHERED_AHEAD, UNDER_EXCHANGE}:
        parts[UNCOVERED] = "communication"
    for part, seconds in prediction.time:
        found[parts.get(part, "rest")] += seconds
    computed = found["forward"] + found["backward"]
    ahead = dict(prediction.time).get(AHEAD, 0.0) if computed else 0.0
    found["rest"] -= ahead
    for name in ("forward", "backward"):
        found[name] += ahead * found[name] / computed if ahead else 0.0
    return found


def measured_terms(run: MeasuredRun, clock: Clock = "wall") -> dict[str, Seconds]:
    """The terms of the stage that is busy longest, in the mean of its ranks."""
    stages: dict[int, list[RankTerms]] = {}
    for rank in run.ranks:
        stages.setdefault(rank.stage, []).append(rank)

    def terms(ranks: Sequence[RankTerms]) -> dict[str, Seconds]:
        found = {name: statistics.fmean(one.seconds[name] for one in ranks) for name in TERMS}
        if clock == "cpu":
            computed = [sum(one.cpu_seconds.values()) for one in ranks]
            names = set().union(*(one.cpu_seconds for one in ranks))
            found |= {name: statistics.fmean(one.cpu_seconds.get(name, 0.0) for one in ranks) for name in names}
            found["waiting"] = max(computed) - statistics.fmean(computed)
        return found

    busy = ("forward", "backward", "update")
    return max((terms(ranks) for ranks in stages.values()), key=lambda found: sum(found[name] for name in busy))


def predicted_peak(prediction: Prediction, device_type: str) -> Bytes:
    """The prediction of the peak that a run measures: on a CPU resident memory, a rank's host memory included; on an
    accelerator the memory of its tensors (`max_memory_allocated`)."""
    if device_type == "cpu":
        return prediction.peak_bytes + dict(prediction.offloaded).get("host", 0.0)
    return prediction.peak_bytes - dict(prediction.memory).get(SLACK, 0.0)


def compare_run(plan: Plan, run: MeasuredRun, clock: Clock = "wall") -> RunComparison:
    """The plan's prediction beside a run of it. Raises RequestError where the run is of another plan."""
    prediction = summed(plan.prediction)
    check_same_plan(plan, run.plan)
    said, found = predicted_terms(prediction), measured_terms(run, clock)
    whole = sum(found.values())
    held = dict(prediction.memory)
    peaks = [stage.peak_bytes for stage in prediction.stages]
    places = {at for at, peak in enumerate(peaks) if peak == prediction.peak_bytes}  # of which prediction.memory is
    ranks = [one for one in run.ranks if one.stage in places] or run.ranks
    fullest = max(ranks, key=lambda one: sum(one.memory.values()))
    state = sum(fullest.memory.values())
    return RunComparison(
        clock=clock,
        predicted_seconds=prediction.step_seconds,
        measured_seconds=whole,
        low_seconds=prediction.low_seconds,
        high_seconds=prediction.high_seconds,
        terms=tuple(_term(name, said[name], found[name], whole) for name in TERMS if said[name] or found[name]),
        memory=tuple(_term(name, held.get(name, 0.0), size, state) for name, size in fullest.memory.items()),
        predicted_peak_bytes=predicted_peak(prediction, run.machine.device_type),
        measured_peak_bytes=max(one.peak_bytes for one in run.ranks) or None,
        peak_kind=run.peak_kind,
    )


def run_plan(plan: Plan) -> RunPlan:
    """What a record says of its plan."""
    return RunPlan(
        model=plan.model.reference,
        parameters=plan.model.parameters,
        profile=plan.cluster.profile,
        software=plan.cluster.software,
        devices=plan.cluster.devices,
        pipeline=plan.pipeline,
        virtual_stages=plan.virtual_stages,
        mesh=tuple(plan.mesh.sizes),
        global_batch=plan.training.global_batch,
        micro_batches=plan.training.micro_batches,
        precision=plan.training.precision,
        optimizer=plan.training.optimizer,
        sequence_length=plan.model.sequence_length,
        predicted=predicted_terms(plan.prediction),
        profile_digest=plan.cluster.digest,
        composition=plan.cluster.composition,
        choices=choices_of(plan),
    )


_CHOICES: Mapping[str, tuple[str, ...]] = {
    "training settings": ("training",),
    "stages": ("stages",),
    "schedule": ("schedule", "virtual_stages", "slices"),
    "order of mesh axes": ("mesh",),
    "layouts of inputs": ("inputs",),
    "sharding, recomputation or ZeRO of its blocks": ("groups", "rules"),
}
"""Parts of a plan file that say what was chosen, by words for them; the others say for what, and what was predicted."""


def choices_of(plan: Plan) -> dict[str, str]:
    """A digest of each part of what a plan chose, whatever the machine is that it was made for. What is at its default
    is left out, so that a setting which a later version adds is in no digest of a plan that does not use it."""
    file = validated(PlanFile, json.dumps(plan_content(plan)))
    return _digests(plan, file.model_dump(mode="json", exclude_defaults=True))


def _choices_as_written(plan: Plan) -> dict[str, str]:
    """The same of the words of a plan file, which older records have."""
    return _digests(plan, plan_content(plan), in_order=True)


def _digests(plan: Plan, content: dict[str, Any], *, in_order: bool = False) -> dict[str, str]:
    content["mesh"] = [(axis.size, axis.order) for axis in plan.mesh.axes]
    content["stages"] = [(stage.first_block, stage.blocks) for stage in plan.stages]
    found = {words: [content.get(key) for key in keys] for words, keys in _CHOICES.items()}
    texts = {words: json.dumps(parts, sort_keys=not in_order) for words, parts in found.items()}
    return {words: hashlib.sha256(text.encode()).hexdigest()[:16] for words, text in texts.items()}


_MACHINE = (
    "profile",
    "software",
    "predicted",
    "profile_digest",
    "composition",
    "choices",
)  # of which a plan may say something else than when it was run


_PREDICTED_BY = ("profile", "software", "profile_digest", "composition")


def check_same_plan(plan: Plan, ran: RunPlan) -> None:
    """Raise RequestError where a run is of another plan, with the first thing that differs."""
    known = run_plan(plan)
    for name in RunPlan.__dataclass_fields__:
        here, there = getattr(known, name), getattr(ran, name)
        if name not in _MACHINE and here != there:
            raise RequestError(
                f"the run is of another plan: {name.replace('_', ' ')} is {_text(there)} in the run and {_text(here)}"
                " in the plan; give the plan that was run"
            )
    written = _choices_as_written(plan)
    for words, digest in ran.choices.items():
        if digest not in (known.choices.get(words), written.get(words)):
            raise RequestError(f"the run is of another plan: the {words} differ; give the plan that was run")
    if (
        not ran.choices
        and ran.profile_digest
        and all(getattr(known, one) == getattr(ran, one) for one in _PREDICTED_BY)
    ):
        here, there = (math.fsum(one.predicted.values()) for one in (known, ran))
        if not math.isclose(here, there, rel_tol=_ROUNDING):  # an older record: another plan takes another time
            raise RequestError(
                f"the run is of another plan: its predicted step takes {there:.6g} s, that of the plan {here:.6g} s;"
                " give the plan that was run"
            )


def _text(value: object) -> str:
    return "x".join(map(str, value)) or "1" if isinstance(value, tuple) else str(value)


def _term(name: str, predicted: float, measured: float, whole: float) -> Term:
    share = (predicted - measured) / whole if whole else 0.0
    return Term(name=name, predicted=predicted, measured=measured, share=share)
