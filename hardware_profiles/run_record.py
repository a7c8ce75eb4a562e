"""What a run of a plan took, term by term, and the file that keeps it (`plan run PLAN --measure FILE`).

    step    |- forward -|- backward -|- transfer -|- update -|- rest -|
                 communication in it      waits        reduction in it        waiting for ranks that come later in both

A file is JSON with exact keys, a `kind` and a `schema_version`. Seconds are those of the host. On a CPU that is all
there is to a step; an accelerator is waited for at the ends of passes, so that work counts where it was asked for.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from hardware_profiles.device import DeviceType
from hardware_profiles.errors import MeasurementsError
from hardware_profiles.foreign import ForeignTextError, decoded, form_fault, parse_json, read_bytes

TERMS = ("forward", "backward", "communication", "transfer", "update", "reduction", "waiting", "rest")
"""Parts of a step. `forward` and `backward` (with what is computed again, and gradients that are added up) without the
collectives in them, which are `communication`; `transfer`: values and gradients between stages, and waiting for them;
`update`: the optimizer without the collectives in it, which are `reduction`; `waiting`: what collectives took on a rank
beyond the least that they took on a rank of their group, which is the one that came last; `rest`: whatever else, the
host between."""

VERSION: Literal[2] = 2

KIND: Literal["measured run"] = "measured run"
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]
_Words = Annotated[str, Field(max_length=200, pattern=r"^\P{C}*$")]  # they get into the sources of numbers of profiles
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The plan that was run, as far as it must be the one that a record is held against; `predicted` has the seconds
    that it said for a step, by `TERMS`. `profile_digest` is that of the machine by which it said so, with the levels
    that `composition` makes; records of before November 2026 have neither. `choices` has a digest of each part of what
    was chosen, as its layouts; records of before 27 November 2026 have none."""

    __pydantic_config__ = _STRICT

    model: str
    parameters: _Count
    profile: str
    software: str
    devices: _Count
    pipeline: _Count
    virtual_stages: _Count
    mesh: tuple[_Count, ...]
    global_batch: _Count
    micro_batches: _Count
    precision: str
    optimizer: str
    sequence_length: _Count | None
    predicted: dict[str, _Finite]
    profile_digest: str = ""
    composition: str = ""
    choices: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMachine:
    """What it was run on."""

    __pydantic_config__ = _STRICT

    name: _Words
    device_type: DeviceType
    torch: _Words
    threads: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTerms:
    """Seconds of a step of one rank by `TERMS`, which sum to the step, and CPU seconds of the thread that computes, by
    the terms in which it does; its peak, and the bytes of what it keeps by class."""

    __pydantic_config__ = _STRICT

    stage: Annotated[int, Field(ge=0)]
    seconds: dict[str, _Finite]
    cpu_seconds: dict[str, _NotNegative]
    peak_bytes: _NotNegative
    memory: dict[str, _NotNegative]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A run. `step_seconds` are those of every step behind the warm-up, of which the middle half makes the terms;
    `profiled_seconds` what a step took under the profiler, which is not among them. `operators` has seconds by class of
    operator of all ranks in the mean, of that step; `collectives` by phase and function: calls, seconds and bytes of a
    step of rank 0, with its waiting. `peak_kind` says what peaks count."""

    __pydantic_config__ = _STRICT

    kind: Literal["measured run"]
    schema_version: Literal[2]
    date: _Words
    plan: RunPlan
    machine: RunMachine
    step_seconds: tuple[_Positive, ...] = Field(min_length=1)
    profiled_seconds: _Positive | None
    ranks: tuple[RankTerms, ...] = Field(min_length=1)
    operators: dict[str, _NotNegative]
    collectives: tuple["CollectiveCalls", ...]
    peak_kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCalls:
    """Calls of one function in one phase of a step."""

    __pydantic_config__ = _STRICT

    phase: str
    call: str
    calls: _Finite
    seconds: _NotNegative
    nbytes: _NotNegative


_ADAPTER = TypeAdapter(MeasuredRun)


def middle_half(seconds: Sequence[float]) -> list[int]:
    """Places of the middle half of steps by their times: outliers of a busy machine are at the ends."""
    order = sorted(range(len(seconds)), key=lambda at: seconds[at])
    quarter = len(order) // 4
    return sorted(order[quarter : len(order) - quarter])


def is_run_record(value: Any) -> bool:
    """Whether the value of a JSON file says that it is a measured run."""
    return isinstance(value, dict) and value.get("kind") == KIND


def load_run_record(path: Path) -> MeasuredRun:
    """The record in a file. Raises `MeasurementsError`, which names it, where it is none."""
    try:
        return parse_run_record(decoded(read_bytes(path)))
    except ForeignTextError as error:
        raise MeasurementsError(f"{path}: {error}; give what plan run PLAN --measure FILE wrote") from error
    except MeasurementsError as error:
        raise MeasurementsError(f"{path}: {error}") from error


def parse_run_record(text: str) -> MeasuredRun:
    """The record in a text. Raises `MeasurementsError` where it is none."""
    try:
        value = parse_json(text)
    except ForeignTextError as error:
        raise MeasurementsError(f"{error}; give what plan run PLAN --measure FILE wrote") from error
    if not is_run_record(value):
        raise MeasurementsError("it is no measured run; plan run PLAN --measure FILE writes one")
    try:
        if value.get("schema_version") == 1:
            raise MeasurementsError(
                "schema_version 1 does not tell waiting for later ranks from communication; measure the plan again"
            )
        found = _ADAPTER.validate_python(value)
    except ValidationError as error:
        raise MeasurementsError(form_fault(error)) from error
    places = [(f"ranks.{rank}.seconds", one.seconds) for rank, one in enumerate(found.ranks)]
    for place, terms in (("plan.predicted", found.plan.predicted), *places):
        if set(terms) != set(TERMS):
            raise MeasurementsError(f"{place}: it has {', '.join(terms)}, not {', '.join(TERMS)}")
    if fault := _fault(found):
        raise MeasurementsError(f"{fault}; measure the plan again")
    return found


_ROUNDING = 1e-6  # seconds


def _fault(run: MeasuredRun) -> str | None:
    """Why numbers that have the right form are those of no run; None where they may be of one. Clocks leave what is
    `rest` a little below 0."""
    if len(run.ranks) != run.plan.devices:
        return f"ranks: it has {len(run.ranks)}, and plan.devices is {run.plan.devices}"
    for at, rank in enumerate(run.ranks):
        if rank.stage >= run.plan.pipeline:
            return f"ranks.{at}.stage: it is {rank.stage}, and plan.pipeline is {run.plan.pipeline}"
        least = min((name for name in TERMS if name != "rest"), key=rank.seconds.__getitem__)
        if rank.seconds[least] < -_ROUNDING:
            return f"ranks.{at}.seconds.{least}: it is {rank.seconds[least]:.6g}, which is below 0"
        if not 0 < sum(rank.seconds.values()) < math.inf:
            return f"ranks.{at}.seconds: they make no step"
    return None


def dump_run_record(run: MeasuredRun) -> str:
    """The content of the file."""
    return json.dumps(asdict(run), indent=1) + "\n"
