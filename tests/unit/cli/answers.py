"""The form of everything that `--json` prints, command by command; docs/json-schema.json is written from it.

python -m tests.unit.cli.answers     writes the document anew
"""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, RootModel
from pydantic.json_schema import models_json_schema

PATH = Path(__file__).parents[3] / "docs" / "json-schema.json"
COMMAND = "python -m tests.unit.cli.answers"
Text = str | None
Number = float | None


class Strict(BaseModel):
    """No key is left out, none is too many."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Degrees(Strict):
    data: int
    tensor: int
    context: int
    expert: int
    pipeline: int
    replicated: int


class Axis(Strict):
    axis: str
    size: int
    role: str


class Choices(Strict):
    degrees: Degrees
    virtual_stages: int
    schedule: str
    slices: int
    copies: int
    sequence_parallel: bool
    optimizer_sharding: str
    micro_batches: int
    recomputation: str
    offload: str


class GroupRun(Strict):
    group: str
    first_stage: int
    stages: int
    first_device: int
    devices: int
    blocks: list[int]


class PlanContent(Choices):
    """What is said of a plan."""

    schema_version: Literal[2]
    model: str
    parameters: int
    hardware: str
    cluster: Text
    software: str
    devices: int
    groups: list[GroupRun] | None
    sequence_length: int | None
    global_batch: int
    precision: str
    optimizer: str
    update: dict[str, Any]
    step_seconds: float
    objective_seconds: float
    low_seconds: Number
    high_seconds: Number
    peak_bytes: float
    capacity_bytes: float
    tokens_per_second_per_device: Number
    samples_per_second: float
    model_flops_utilisation: float
    mesh: list[Axis]
    time_seconds: dict[str, float]
    memory_bytes: dict[str, float]
    offloaded_bytes: dict[str, float]


class Certificate(Strict):
    solver: str
    status: str
    busy_seconds: float
    bound_seconds: float
    gap: float
    variables: int
    seconds: float


class Search(Strict):
    algorithm: str
    status: Literal["optimal", "feasible"]
    gap: float
    bound_seconds: float
    configurations: int
    evaluated: int
    solved: int
    search_seconds: float
    total_seconds: float
    placements: int
    stopped: bool
    certificate: Certificate | None


class Listed(Choices):
    step_seconds: float
    objective_seconds: float
    peak_bytes: float
    gap: Number
    devices: int
    mesh: list[int]
    plan_file: Text


class NextBest(Strict):
    step_seconds: float
    peak_bytes: float
    differences: dict[str, dict[str, str]]


class Explanation(Strict):
    seconds: dict[str, float]
    memory_binds: bool
    seconds_per_byte: float
    free_bytes: float
    slowest_rank: int
    fullest_rank: int
    next_best: NextBest | None


class Context(Strict):
    ring: int
    heads: int
    seconds: Number
    bound: Number
    least: Number


class Choice(Strict):
    name: str
    value: str
    why: str


class Answer(PlanContent):
    """`plan`, `plan estimate --model`."""

    objective: str
    search: Search
    plans: list[Listed]
    explanation: Explanation | None
    contexts: list[Context] = []
    discovered: list[dict[str, Any]] = []
    choices: list[Choice] = []
    plan_file: Text


class Repriced(PlanContent):
    """`plan estimate PLAN`."""

    step_seconds_in_file: float
    plan_file: Text


class Shown(PlanContent):
    """`plan show`."""

    fits: bool
    remarks: list[str]


class StageOfRank(Strict):
    stage: int
    first_block: int
    blocks: int


class Peers(Strict):
    name: str
    role: str
    ranks: list[int]


class HeldInput(Strict):
    name: str
    shape: list[int]
    piece: list[list[tuple[int, int]]]


class HeldParameter(Strict):
    name: str
    shape: list[int]
    weight: list[list[tuple[int, int]]]
    gradient: list[list[tuple[int, int]]]
    state: list[list[tuple[int, int]]]
    partial: list[str]


class ShownRank(Strict):
    """`plan show --rank`."""

    schema_version: Literal[2]
    rank: int
    devices: int
    pipeline_rank: int
    coordinate: dict[str, int]
    stages: list[StageOfRank]
    peers: list[Peers]
    inputs: list[HeldInput]
    parameters: list[HeldParameter]


class Verified(Strict):
    """`plan verify`."""

    schema_version: Literal[2]
    fits: bool
    as_stated: bool
    step_seconds: float
    peak_bytes: float
    capacity_bytes: float
    remarks: list[str]


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

    schema_version: Literal[2]
    first: End
    second: End
    difference_seconds: float
    difference_bytes: float
    steps: list[DiffStep]
    stopped: bool


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

    schema_version: Literal[2]
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

    schema_version: Literal[2]
    step_seconds: float
    peak_bytes: float
    capacity_bytes: float
    stopped: bool
    subjects: list[Subject]


class ListedModel(Strict):
    """Dimensions are numbers, words or truth values, those of images lists of numbers."""

    model: str
    family: str
    parameters: int
    dimensions: dict[str, Any]
    source: str


class Model(ListedModel):
    """`plan models NAME`."""

    schema_version: Literal[1]


class Models(Strict):
    """`plan models`."""

    schema_version: Literal[1]
    models: list[ListedModel]


class Level(Strict):
    name: str
    fan_out: int | None
    bytes_per_second: float


class Fact(Strict):
    key: str
    value: float
    source: str
    kind: Literal["datasheet", "measured", "fitted", "assumed"]


class ListedProfile(Strict):
    profile: str
    device: str
    memory_bytes: float
    levels: list[Level]


class Profiles(Strict):
    """`plan profiles`."""

    schema_version: Literal[1]
    profiles: list[ListedProfile]


class Profile(ListedProfile):
    """`plan profiles NAME`."""

    schema_version: Literal[1]
    facts: list[Fact]


class Fitted(ListedProfile):
    """`plan profiles NAME --fit`."""

    schema_version: Literal[1]
    parameters: list[dict[str, Any]]
    fit_errors: list[dict[str, Any]]
    run_errors: dict[str, Any] | None


class Stacks(Strict):
    """`plan stacks`."""

    schema_version: Literal[1]
    stacks: list[dict[str, Any]]


class Stack(BaseModel):
    """`plan stacks NAME`; the other keys are the fields of `hardware_profiles.Software`."""

    schema_version: Literal[1]
    name: str
    facts: list[Fact]


class Collective(Strict):
    phase: str
    operator: str
    kind: str
    axis: int | None
    nbytes: float
    predicted: int
    emitted: int


class RunStep(Strict):
    """`plan run`, a line for each step."""

    schema_version: Literal[1]
    event: Literal["step"]
    step: int
    steps: int
    loss: Number
    unsharded: Number
    seconds: float
    samples: int
    tokens: int | None
    trouble: Text
    back_to: int | None


class SlowRank(Strict):
    rank: int
    seconds: float
    times: float


class RunSummary(Strict):
    """`plan run`, the last line."""

    schema_version: Literal[1]
    event: Literal["summary"]
    steps: int
    data: str
    seconds: Number
    samples: int
    tokens: int | None
    predicted_seconds: float
    low_seconds: Number
    high_seconds: Number
    profile: str
    elsewhere: str
    peak_bytes: list[float]
    peak_kind: str
    predicted_peak_bytes: float
    precision: str
    difference: Number
    tolerance: float
    resumed: Text
    saved: Text
    busy_seconds: list[float]
    slow: list[SlowRank]
    agrees: bool | None


class RunRestart(Strict):
    """`plan run`, a line where the ranks are started again."""

    schema_version: Literal[1]
    event: Literal["restart"]
    restart: int
    step: int
    devices: int
    reason: str


class RunNotice(Strict):
    """`plan run`, a line about something that whoever looks after the run should know."""

    schema_version: Literal[1]
    event: Literal["notice"]
    text: str


class Run(RootModel[RunStep | RunSummary | RunRestart | RunNotice]):
    """`plan run`: every line by itself."""


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

    schema_version: Literal[2]
    agrees: bool
    stages: list[AuditedStage]


class Residual(Strict):
    part: str
    rows: int
    mean_absolute: float


class Calibrated(Strict):
    """`plan calibrate`, `plan fit`."""

    schema_version: Literal[1]
    profile: str
    profile_file: str
    measurements_file: str
    residuals: list[Residual]


class Row(Strict):
    id: str
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
    feasible: bool | None
    notes: list[str]
    error: Text


class Validated(Strict):
    """`plan validate`."""

    schema_version: Literal[1]
    rows: list[Row]
    summary: dict[str, Any]


class GivenUp(Strict):
    what: str
    here: str
    there: str
    step_seconds: Number
    peak_bytes: Number


class Hosts(Strict):
    """Hosts of one of several kinds of devices, as engines count nodes."""

    profile: str
    first: int
    count: int


class Exported(Strict):
    """`plan export`."""

    schema_version: Literal[2]
    engine: str
    about: str
    model: str
    devices: int
    step_seconds: float
    peak_bytes: float
    fits: bool
    plan_step_seconds: float
    plan_peak_bytes: float
    given_up: list[GivenUp]
    hosts: list[Hosts] | None
    folder: str
    files: list[str]


class Imported(PlanContent):
    """`plan import`."""

    fits: bool
    notes: list[str]
    plan_file: Text


class Reported(BaseModel):
    """`plan report`; the other keys are what the page shows."""

    schema_version: Literal[2]
    model: str
    prediction: dict[str, Any]
    remarks: list[str]
    page: Text
    trace: Text


class Advice(Strict):
    change: str
    devices: int
    step_seconds: Number
    peak_bytes: Number
    samples_per_second: Number
    tokens_per_second_per_device: Number


class Refusal(Strict):
    kind: Literal["bad input", "infeasible", "run broke down", "interrupted"]
    message: str
    missing_bytes: Number = None
    needed_bytes: Number = None
    changes: list[Advice] = []


class Refused(Strict):
    """Every command that is refused."""

    schema_version: Literal[2]
    error: Refusal


class SavedFile(Strict):
    name: str
    bytes: int
    checksum: Text
    fault: Text


class SavedTensor(Strict):
    shape: list[int]
    dtype: str
    cuts: list[int]


class Inspected(Strict):
    schema_version: Literal[2]
    checkpoint: str
    kind: Literal["sliced", "merged"]
    names: Literal["own", "huggingface"] | None
    manifest: bool
    step: int
    samples: int
    seed: int
    optimizer: Text
    data: dict[str, Any] | None
    model: Text
    devices: int | None
    files: list[SavedFile]
    tensors: dict[str, SavedTensor]
    tied: dict[str, str]
    incomplete: list[str]


class Adopted(Strict):
    schema_version: Literal[2]
    folder: str
    run: str
    identity: str
    checkpoints: int


class VerifiedCheckpoint(Strict):
    schema_version: Literal[2]
    checkpoint: str
    files: int
    bytes: int
    whole: Literal[True]


class Written(Strict):
    schema_version: Literal[2]
    checkpoint: str
    kind: Literal["sliced", "merged"]
    names: Literal["own", "huggingface"] | None
    files: int
    bytes: int
    tensors: int


ANSWERS: dict[str, type[BaseModel]] = {
    "plan": Answer,
    "plan estimate": Answer,
    "plan estimate PLAN": Repriced,
    "plan diff": Diff,
    "plan explain PLAN": Explained,
    "plan explain PLAN NAME": ExplainedNames,
    "plan show": Shown,
    "plan show --rank": ShownRank,
    "plan verify": Verified,
    "plan audit": Audit,
    "plan validate": Validated,
    "plan run": Run,
    "plan models": Models,
    "plan models NAME": Model,
    "plan profiles": Profiles,
    "plan profiles NAME": Profile,
    "plan profiles NAME --fit": Fitted,
    "plan export": Exported,
    "plan import": Imported,
    "plan report": Reported,
    "plan stacks": Stacks,
    "plan stacks NAME": Stack,
    "plan calibrate": Calibrated,
    "plan fit": Calibrated,
    "plan checkpoint adopt": Adopted,
    "plan checkpoint inspect": Inspected,
    "plan checkpoint verify": VerifiedCheckpoint,
    "plan checkpoint convert": Written,
    "plan checkpoint merge": Written,
    "error": Refused,
}


def content() -> str:
    """The document: for each command the JSON Schema of its answer, and what the schemas share."""
    known = set(ANSWERS.values())
    ordered = sorted(known, key=lambda model: model.__name__)
    places, shared = models_json_schema([(model, "serialization") for model in ordered])
    answers = {name: places[model, "serialization"] for name, model in ANSWERS.items()}
    return json.dumps({"answers": answers, **shared}, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    PATH.write_text(content(), encoding="utf-8")
