"""What `plan run` tells, one object a line; and checkpoints."""

from typing import Any, Literal

from pydantic import RootModel

from planner.cli.schemas.form import Number, Strict, Text


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


class RunEvaluation(Strict):
    """`plan run --evaluate`, a line for each time that the model is evaluated."""

    schema_version: Literal[1]
    event: Literal["evaluation"]
    step: int
    data: str
    loss: Number
    unsharded: Number
    seconds: float
    batches: int
    samples: int
    tokens: int | None
    left_out: int | None


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


class Run(RootModel[RunStep | RunEvaluation | RunSummary | RunRestart | RunNotice]):
    """`plan run`: every line by itself."""


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
    schema_version: Literal[3]
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
    schema_version: Literal[3]
    folder: str
    run: str
    identity: str
    checkpoints: int


class VerifiedCheckpoint(Strict):
    schema_version: Literal[3]
    checkpoint: str
    files: int
    bytes: int
    whole: Literal[True]


class Written(Strict):
    schema_version: Literal[3]
    checkpoint: str
    kind: Literal["sliced", "merged"]
    names: Literal["own", "huggingface"] | None
    files: int
    bytes: int
    tensors: int
