"""Answers of `models`, `profiles`, `stacks`, `calibrate` and `fit`."""

from typing import Any, Literal

from pydantic import BaseModel

from planner.cli.schemas.form import Number, Strict


class ListedModel(Strict):
    """A model of the zoo. Dimensions are numbers, words or booleans; those of images are lists of numbers."""

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
    """A network level. `fan_out` is null for any number; bandwidth is per device and direction."""

    name: str
    fan_out: int | None
    bytes_per_second: float


class Fact(Strict):
    """A number of a profile in the unit of its key, with its source."""

    key: str
    value: float
    source: str
    kind: Literal["datasheet", "measured", "fitted", "assumed"]


class ListedProfile(Strict):
    """A hardware profile: its device, and its network levels, innermost first."""

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
    """`plan profiles NAME --fit`: the fitted numbers, and their errors against measurements and training runs."""

    schema_version: Literal[1]
    parameters: list[dict[str, Any]]
    fit_errors: list[dict[str, Any]]
    run_errors: dict[str, Any] | None


class Stacks(Strict):
    """`plan stacks`."""

    schema_version: Literal[1]
    stacks: list[dict[str, Any]]


class Stack(BaseModel):
    """`plan stacks NAME`. The other keys are the fields of `hardware_profiles.Software`; sizes are in bytes."""

    schema_version: Literal[1]
    name: str
    facts: list[Fact]


class Collective(Strict):
    """A collective of a step: its bytes, and the number predicted and run. `axis` is null between stages and between
    host and device."""

    phase: str
    operator: str
    kind: str
    axis: int | None
    nbytes: float
    predicted: int
    emitted: int


class Residual(Strict):
    """Mean relative error of the fit to the times of one class."""

    part: str
    rows: int
    mean_absolute: float


class Calibrated(Strict):
    """`plan calibrate`, `plan fit MEASUREMENTS`."""

    schema_version: Literal[1]
    profile: str
    profile_file: str
    measurements_file: str
    residuals: list[Residual]


class Correction(Strict):
    """How many times as fast as the profile said; null if no run tells."""

    name: str
    value: Number
    low: float
    high: float
    runs: int


class Corrected(Strict):
    """`plan fit RUN...`: the profile that was corrected, and the factors."""

    schema_version: Literal[1]
    profile: str
    profile_file: str
    corrected: str
    clock: Literal["wall", "cpu"]
    factors: list[Correction]
