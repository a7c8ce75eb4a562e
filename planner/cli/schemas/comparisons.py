"""What `plan diff`, `explain`, `report`, `audit` and `validate` find."""

from typing import Any, Literal

from pydantic import BaseModel

from planner.cli.schemas.form import Number, Strict, Text
from planner.cli.schemas.lists import Collective


class End(Strict):
    plan_file: str
    step_seconds: float
    peak_bytes: float
    capacity_bytes: float


class Item(Strict):
    name: str
    first: str
    second: str


class Difference(Item):
    items: list[Item]


class DiffStep(Strict):
    differences: list[Difference]
    difference_seconds: float
    difference_bytes: float
    step_seconds_before: float
    step_seconds_after: float
    peak_bytes_before: float
    peak_bytes_after: float
    fits: bool


class Diff(Strict):
    """`plan diff`."""

    schema_version: Literal[3]
    first: End
    second: End
    difference_seconds: float
    difference_bytes: float
    steps: list[DiffStep]
    stopped: bool


class AdvisedFigures(Strict):
    step_seconds: float
    peak_bytes: float
    fits: bool


class AdvisedChange(AdvisedFigures):
    change: str
    here: str
    there: str
    saved_seconds: float


class Advised(Strict):
    """`plan advise`."""

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


class Outcome(Strict):
    step_seconds: Number
    peak_bytes: Number
    samples_per_second: Number
    why: Text


class Sensitivity(Strict):
    name: str
    change: str
    devices: int
    sequence_length: int | None
    kept: Outcome
    searched: Outcome | None


class Binding(Strict):
    seconds: dict[str, float]
    free_bytes: float
    slowest_rank: int
    fullest_rank: int


class Explained(Strict):
    """`plan explain PLAN`."""

    schema_version: Literal[3]
    step_seconds: float
    peak_bytes: float
    capacity_bytes: float
    stopped: bool
    explanation: Binding
    sensitivities: list[Sensitivity]


class Alternative(Strict):
    choice: str
    chosen: bool
    step_seconds: Number
    peak_bytes: Number
    fits: bool
    why: Text
    around: Outcome | None


class Subject(Strict):
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
    phase: str
    operator: str
    predicted: float
    emitted: float


class AuditedStage(Strict):
    stage: int
    rank: int
    agrees: bool
    collectives: list[Collective]
    products: list[Product]
    live_bytes: dict[str, float]
    predicted_live_bytes: dict[str, float]
    stated_bytes: float


class Audit(Strict):
    """`plan audit`."""

    schema_version: Literal[3]
    agrees: bool
    stages: list[AuditedStage]


class SmallPlan(Strict):
    model: str
    processes: int
    mesh: list[int]
    pipeline: int
    micro_batches: int
    blocks: list[int]


class MissingDecision(Strict):
    decision: str
    times: int


class Decisions(Strict):
    kind: str
    different: int
    proved: int
    made: int
    made_proved: int
    missing: list[MissingDecision]


class ProvedIn(Strict):
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
    """`plan prove`."""

    schema_version: Literal[3]
    agrees: bool
    complete: bool
    not_in_float64: Text
    small: SmallPlan
    decisions: list[Decisions]
    differences: list[ProvedIn]


class Row(Strict):
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
    """`plan validate`."""

    schema_version: Literal[1]
    rows: list[Row]
    summary: dict[str, Any]


class Term(Strict):
    name: str
    predicted: float
    measured: float
    share: float
    wrong: bool


class ClassTime(Strict):
    """Seconds of a step in operators of one class; `calls` are kernels."""

    name: str
    predicted: Number
    measured: Number
    calls: Number


class TracedCollective(Strict):
    """Collectives of one kind in a step of a trace; `exposed` are the seconds that no kernel covers."""

    name: str
    calls: float
    seconds: float
    exposed: float


class Compared(Strict):
    """`plan compare`."""

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
    """One case of a comparison; money in the currency of --price."""

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


class Cases(Strict):
    """`plan compare --model`; `fastest` and `cheapest` count the rows from 0."""

    schema_version: Literal[1]
    rows: list[Case]
    fastest: int | None
    cheapest: int | None
    stopped: bool


class Enough(Strict):
    """`plan capacity`; `devices` None: none of those looked at is enough."""

    schema_version: Literal[1]
    days: float
    devices: int | None
    rows: list[Case]


class EngineRow(Strict):
    """The best plan of an engine, or with `engine` null of the runtime; `why` says why there is none."""

    engine: Text
    software: str
    step_seconds: Number
    peak_bytes: Number
    gap: Number
    words: dict[str, str] | None
    why: Text


class ComparedEngines(Strict):
    """`plan compare --engines`."""

    schema_version: Literal[1]
    engines: list[EngineRow]


class Replanned(Strict):
    """`plan replan`."""

    schema_version: Literal[1]
    profile: str
    step_seconds_before: float
    kept: End
    best: End
    saved_seconds: float
    differences: list[Item]
    stopped: bool


class Reported(BaseModel):
    """`plan report`; the other keys are what the page shows."""

    schema_version: Literal[3]
    model: str
    prediction: dict[str, Any]
    remarks: list[str]
    page: Text
    trace: Text
