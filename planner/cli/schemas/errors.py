"""The answer of a command that fails."""

from typing import Literal

from pydantic import Field

from planner.cli.schemas.form import Number, Strict


class Advice(Strict):
    """A change with which a plan fits, and the best plan found with it; null where there was no time to find one."""

    change: str
    devices: int
    step_seconds: Number
    peak_bytes: Number
    samples_per_second: Number
    tokens_per_second_per_device: Number


class Refusal(Strict):
    """The line on stderr. If nothing fits, also the bytes per device that the leanest plan needs and lacks, and changes
    with which a plan fits."""

    kind: Literal["bad input", "infeasible", "limit reached", "run broke down", "interrupted"]
    message: str
    missing_bytes: Number = None
    needed_bytes: Number = None
    changes: list[Advice] = Field(default_factory=list)


class Refused(Strict):
    """Every command that fails with bad input, no fitting plan, a limit, a failed run, or an interrupt."""

    schema_version: Literal[3]
    error: Refusal
