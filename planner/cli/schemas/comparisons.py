"""Answers of commands that compare: `diff`, `advise`, `explain`, `audit`, `prove`, `validate`, `compare`, `capacity`,
`replan`, `report`."""

from typing import Any, Literal

from pydantic import BaseModel

from planner.cli.schemas.form import Number, Strict, Text
from planner.cli.schemas.lists import Collective


class End(Strict):
    """One of two plans, priced now."""

    plan_file: str
    step_seconds: float
    peak_bytes: float
    capacity_bytes: float


class Item(Strict):
    """What the first and the second plan say."""

    name: str
    first: str
    second: str


class Difference(Item):
    """A difference between two plans, with the operators or parameters that differ."""

    items: list[Item]


class DiffStep(Strict):
    """Differences made at once, and what they cost. `fits`: whether the plan after them fits."""

    differences: list[Difference]
    difference_seconds: float
    difference_bytes: float
    step_seconds_before: float
    step_seconds_after: float
    peak_bytes_before: float
    peak_bytes_after: float
    fits: bool


class Diff(Strict):
    """`plan diff`: the steps from the first plan to the second. Differences are second minus first."""

    schema_version: Literal[3]
    first: End
    second: End
    difference_seconds: float
    difference_bytes: float
    steps: list[DiffStep]
    stopped: bool


class AdvisedFigures(Strict):
    """Prediction of a configuration."""

    step_seconds: float
    peak_bytes: float
    fits: bool


class AdvisedChange(AdvisedFigures):
    """A change of the configuration, what it saves, and the figures after it."""

    change: str
    here: str
    there: str
    saved_seconds: float


class Advised(Strict):
    """`plan advise`. `gap` is how much faster than `best` a plan of the engine's space can be, as a share."""

    schema_version: Literal[3]
    engine: str
    model: str
    devices: int
    software: str
    unmodelled: list[str]
    notes: list[str]
    unread: list[str]
    now: AdvisedFigures
    best: AdvisedFigures | None
    gap: float | None
    changes: list[AdvisedChange]
    file: str | None
    stopped_by: Literal["interrupt", "memory", "time"] | None


class Outcome(Strict):
    """Prediction of a plan, or null and `why` there is none."""

    step_seconds: Number
    peak_bytes: Number
    samples_per_second: Number
    why: Text


class Sensitivity(Strict):
    """A change of the machine or the job: the step of this plan (`kept`), and of the plan searched for the change."""

    name: str
    change: str
    devices: int
    sequence_length: int | None
    kept: Outcome
    searched: Outcome | None


class Binding(Strict):
    """What limits a plan: seconds by resource, free bytes, and the ranks that decide."""

    seconds: dict[str, float]
    free_bytes: float
    slowest_rank: int
    fullest_rank: int


class Explained(Strict):
    """`plan explain PLAN`. `stopped`: Ctrl-C or `--time-limit` ended it early."""

    schema_version: Literal[3]
    step_seconds: float
    peak_bytes: float
    capacity_bytes: float
    stopped: bool
    explanation: Binding
    sensitivities: list[Sensitivity]


class Alternative(Strict):
    """A strategy or stored layout, and the prediction with it, all else unchanged. `around`: the best plan with it in
    the same configuration."""

    choice: str
    chosen: bool
    step_seconds: Number
    peak_bytes: Number
    fits: bool
    why: Text
    around: Outcome | None


class Subject(Strict):
    """An operator or a parameter, named as in its first block, and its choices, the fastest that fits first."""

    name: str
    kind: Literal["operator", "parameter"]
    count: int
    choices: list[Alternative]


class ExplainedNames(Strict):
    """`plan explain PLAN NAME`."""

    schema_version: Literal[3]
    step_seconds: float
    peak_bytes: float
    capacity_bytes: float
    stopped: bool
    subjects: list[Subject]


class Product(Strict):
    """Floating point operations of an operator in a step, predicted and run."""

    phase: str
    operator: str
    predicted: float
    emitted: float


class AuditedStage(Strict):
    """A stage, and the rank of it that was run. Bytes are at the moment of the peak; `stated_bytes` is the peak that
    the plan states."""

    stage: int
    rank: int
    agrees: bool
    collectives: list[Collective]
    products: list[Product]
    live_bytes: dict[str, float]
    predicted_live_bytes: dict[str, float]
    stated_bytes: float


class Audit(Strict):
    """`plan audit`. `agrees`: all rows are equal, and live memory is within its tolerance."""

    schema_version: Literal[3]
    agrees: bool
    stages: list[AuditedStage]


class SmallPlan(Strict):
    """A small plan that was run. For each of its blocks, `blocks` has the block of the plan that it stands for."""

    model: str
    processes: int
    mesh: list[int]
    pipeline: int
    micro_batches: int
    blocks: list[int]


class MissingDecision(Strict):
    """A decision of the plan that no small plan makes, and how often the plan makes it."""

    decision: str
    times: int


class Decisions(Strict):
    """Decisions of one kind: the number of different ones and how many are proved; how often the plan makes them, and
    how often a proved one."""

    kind: str
    different: int
    proved: int
    made: int
    made_proved: int
    missing: list[MissingDecision]


class ProvedIn(Strict):
    """Relative differences from the unsharded model in one precision. `failures` names those above `tolerances`."""

    precision: str
    steps: int
    parameters: int
    loss: Number
    gradient: Number
    worst_gradient: str
    change: Number
    worst_change: str
    buffer: Number
    fp8: bool
    failures: list[str]
    tolerances: dict[str, float]


class Proved(Strict):
    """`plan prove`. `agrees`: the small plans compute what the unsharded model does. `complete`: every decision of the
    plan is in one of them."""

    schema_version: Literal[3]
    agrees: bool
    complete: bool
    not_in_float64: Text
    small: SmallPlan
    decisions: list[Decisions]
    differences: list[ProvedIn]


class Row(Strict):
    """A measured run and its prediction. Intervals hold four of five steps and nine of ten peaks. `feasible`: it fits
    by the memory model; `error`: why it could not be evaluated."""

    id: str
    line: int
    source: Text
    profile: Text
    rank_group: Text
    tier: Text
    flag: Text
    measured_seconds: Number
    predicted_seconds: Number
    low_seconds: Number
    high_seconds: Number
    measured_peak_bytes: Number
    predicted_peak_bytes: Number
    low_peak_bytes: Number
    high_peak_bytes: Number
    peak_kind: Literal["allocated", "reserved", "used"] | None
    needed_bytes: Number
    capacity_bytes: Number
    time_seconds: dict[str, float] | None
    feasible: bool | None
    notes: list[str]
    error: Text


class Validated(Strict):
    """`plan validate`. docs/json.md lists the keys of `summary`."""

    schema_version: Literal[1]
    rows: list[Row]
    summary: dict[str, Any]


class Term(Strict):
    """A part of the step or of memory. `share` is its error over the measured whole, positive where the prediction is
    too high."""

    name: str
    predicted: float
    measured: float
    share: float
    wrong: bool


class ClassTime(Strict):
    """Seconds of a step in operators of one class. `calls` are kernels."""

    name: str
    predicted: Number
    measured: Number
    calls: Number


class TracedCollective(Strict):
    """Collectives of one kind in a step of a trace. `exposed` are the seconds that no kernel overlaps."""

    name: str
    calls: float
    seconds: float
    exposed: float


class Compared(Strict):
    """`plan compare PLAN`: prediction and measurement. `inside`: the measured step lies in the interval."""

    schema_version: Literal[1]
    clock: Literal["wall", "cpu"]
    predicted_seconds: float
    measured_seconds: float
    error: float
    low_seconds: Number
    high_seconds: Number
    inside: bool | None
    terms: list[Term]
    memory: list[Term]
    predicted_peak_bytes: float
    measured_peak_bytes: Number
    peak_kind: str
    predicted_tflops: Number
    measured_tflops: Number
    classes: list[ClassTime]
    collectives: list[TracedCollective]
    measured_steps: int


class Case(Strict):
    """A case of a comparison. Costs are in the currency of --price; `reason` says why there is no plan, `stopped_by`
    what ended its search early."""

    model: str
    hardware: str
    devices: int
    software: str
    step_seconds: Number
    low_step_seconds: Number
    high_step_seconds: Number
    tokens_per_second: Number
    model_flops_utilisation: Number
    days: Number
    low_days: Number
    high_days: Number
    device_hours: Number
    low_device_hours: Number
    high_device_hours: Number
    cost: Number
    low_cost: Number
    high_cost: Number
    slowdown_by_failures: Number
    memory_left_bytes: Number
    scaling_efficiency: Number
    reason: Text
    stopped_by: Literal["interrupt", "memory", "time"] | None


class Cases(Strict):
    """`plan compare --model`. `fastest` and `cheapest` are indices of `rows`, from 0."""

    schema_version: Literal[1]
    rows: list[Case]
    fastest: int | None
    cheapest: int | None
    stopped: bool


class Enough(Strict):
    """`plan capacity`. `devices` is null if none of the numbers that were tried is enough."""

    schema_version: Literal[1]
    days: float
    devices: int | None
    rows: list[Case]
    stopped: bool


class EngineRow(Strict):
    """The best plan of an engine, or of the runtime of this project (`engine` is null). `why` says why there is
    none."""

    engine: Text
    software: str
    step_seconds: Number
    peak_bytes: Number
    gap: Number
    words: dict[str, str] | None
    why: Text
    stopped_by: Literal["interrupt", "memory", "time"] | None


class ComparedEngines(Strict):
    """`plan compare --engines`."""

    schema_version: Literal[1]
    engines: list[EngineRow]


class Replanned(Strict):
    """`plan replan`: the plan kept and the best plan, both priced with the new profile."""

    schema_version: Literal[1]
    profile: str
    step_seconds_before: float
    kept: End
    best: End
    saved_seconds: float
    differences: list[Item]
    stopped: bool


class Reported(BaseModel):
    """`plan report`. The other keys are what the page shows (docs/json.md)."""

    schema_version: Literal[3]
    model: str
    prediction: dict[str, Any]
    remarks: list[str]
    page: Text
    trace: Text
