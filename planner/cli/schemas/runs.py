"""Answers of `plan run`, one object per line, and of `plan checkpoint`."""

from typing import Any, Literal

from pydantic import RootModel

from planner.cli.schemas.form import Number, Strict, Text


class RunStep(Strict):
    """`plan run`, a line for each step. `trouble` says why the batch was not used; `back_to` is the step to which a
    rollback returned."""

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
    """`plan run --evaluate`, a line for each evaluation. `left_out` samples are behind the last whole batch."""

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
    """A rank that is `times` slower than the median of its peers."""

    rank: int
    seconds: float
    times: float


class RunSummary(Strict):
    """`plan run`, the last line. `seconds` is the median step without the first two; `elsewhere` says why this machine
    is not that of `profile`, or is empty."""

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
    """`plan run`, a line for each restart of the ranks."""

    schema_version: Literal[1]
    event: Literal["restart"]
    restart: int
    step: int
    devices: int
    reason: str


class RunNotice(Strict):
    """`plan run`, a line for the person who watches the run."""

    schema_version: Literal[1]
    event: Literal["notice"]
    text: str


class Run(RootModel[RunStep | RunEvaluation | RunSummary | RunRestart | RunNotice]):
    """`plan run`: each line by itself."""


class SavedFile(Strict):
    """A file of a checkpoint. `fault`: missing, or of another size than was written."""

    name: str
    bytes: int
    checksum: Text
    fault: Text


class SavedTensor(Strict):
    """A tensor of a checkpoint. `cuts` is the number of slices on each dim."""

    shape: list[int]
    dtype: str
    cuts: list[int]


class Inspected(Strict):
    """`plan checkpoint inspect`. `tied` has other names of tensors; `incomplete` are remarks on later folders without a
    manifest."""

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
    """`plan checkpoint adopt`: the run, the new identity of the folder, and the number of its checkpoints."""

    schema_version: Literal[3]
    folder: str
    run: str
    identity: str
    checkpoints: int


class VerifiedCheckpoint(Strict):
    """`plan checkpoint verify`. `whole` is always true: anything else is an error."""

    schema_version: Literal[3]
    checkpoint: str
    files: int
    bytes: int
    whole: Literal[True]


class Written(Strict):
    """`plan checkpoint convert`, `plan checkpoint merge`."""

    schema_version: Literal[3]
    checkpoint: str
    kind: Literal["sliced", "merged"]
    names: Literal["own", "huggingface"] | None
    files: int
    bytes: int
    tensors: int
