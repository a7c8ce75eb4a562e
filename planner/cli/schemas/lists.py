"""What there is: models, profiles of machines, software stacks; and what was measured of a machine."""

from typing import Any, Literal

from pydantic import BaseModel

from planner.cli.schemas.form import Number, Strict


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


class Correction(Strict):
    name: str
    value: Number
    low: float
    high: float
    runs: int


class Corrected(Strict):
    """`plan fit RUN...`."""

    schema_version: Literal[1]
    profile: str
    profile_file: str
    corrected: str
    clock: Literal["wall", "cpu"]
    factors: list[Correction]
