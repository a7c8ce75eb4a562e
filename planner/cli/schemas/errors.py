"""How a command that fails says so."""

from typing import Literal

from pydantic import Field

from planner.cli.schemas.form import Number, Strict


class Advice(Strict):
    change: str
    devices: int
    step_seconds: Number
    peak_bytes: Number
    samples_per_second: Number
    tokens_per_second_per_device: Number


class Refusal(Strict):
    kind: Literal["bad input", "infeasible", "limit reached", "run broke down", "interrupted"]
    message: str
    missing_bytes: Number = None
    needed_bytes: Number = None
    changes: list[Advice] = Field(default_factory=list)


class Refused(Strict):
    """Every command that is refused."""

    schema_version: Literal[3]
    error: Refusal
