"""Times of a run of a plan, term by term, and the file that keeps them (`plan run PLAN --measure FILE`).

    step    |- forward -|- backward -|- transfer -|- update -|- rest -|
                 communication in it      waits        reduction in it        waiting for ranks that come later in both

A file is JSON with exact keys, a `kind` and a `schema_version`. Seconds are those of the host. On a CPU they are the
whole step. An accelerator is synchronised at the ends of passes, so that work counts in the pass that launched it.
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
"""Parts of a step. `forward` and `backward` (with recomputation and accumulation of gradients) exclude their
collectives, which are `communication`. `transfer`: values and gradients between stages, and waits for them. `update`:
the optimizer without its collectives, which are `reduction`. `waiting`: the time of collectives on a rank beyond the
least time on a rank of their group, which is the rank that came last. `rest`: everything else, such as the host in
between."""

VERSION: Literal[2] = 2

KIND: Literal["measured run"] = "measured run"
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]
_Words = Annotated[str, Field(max_length=200, pattern=r"^\P{C}*$")]  # they end up in the sources of profile numbers
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The plan that was run, with the fields that are compared with a given plan.

    `predicted` has the plan's seconds of a step, by `TERMS`. `profile_digest` is that of the machine of the prediction,
    with the levels of `composition`; records from before November 2026 have neither. `choices` has a digest of each
    part of the plan's choices, such as its layouts; records from before 27 November 2026 have none.
    """

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
    """The machine of the run."""

    __pydantic_config__ = _STRICT

    name: _Words
    device_type: DeviceType
    torch: _Words
    threads: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTerms:
    """Times and memory of one rank in a step.

    `seconds` are by `TERMS` and sum to the step. `cpu_seconds` are those of the computing thread, in the terms in which
    it computes. `memory` has the bytes that the rank keeps, by class.
    """

    __pydantic_config__ = _STRICT

    stage: Annotated[int, Field(ge=0)]
    seconds: dict[str, _Finite]
    cpu_seconds: dict[str, _NotNegative]
    peak_bytes: _NotNegative
    memory: dict[str, _NotNegative]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A measured run.

    Attributes:
        kind: always "measured run".
        schema_version: version of the file's form.
        date: date of the run.
        plan: the plan that was run.
        machine: the machine of the run.
        step_seconds: every step after the warm-up; the middle half of them makes the terms.
        profiled_seconds: a step under the profiler, which is not among `step_seconds`.
        ranks: one entry per rank.
        operators: seconds of the profiled step by class of operator, mean over all ranks.
        collectives: by phase and function: calls, seconds and bytes in a step of rank 0, waits included.
        peak_kind: what peaks count.
    """

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
    """Indexes of the middle half of steps by their times; outliers of a busy machine are at the ends."""
    order = sorted(range(len(seconds)), key=lambda at: seconds[at])
    quarter = len(order) // 4
    return sorted(order[quarter : len(order) - quarter])


def is_run_record(value: Any) -> bool:
    """Whether the value of a JSON file claims to be a measured run."""
    return isinstance(value, dict) and value.get("kind") == KIND


def load_run_record(path: Path) -> MeasuredRun:
    """The record in a file. Raises `MeasurementsError`, which names the file, if it is not a record."""
    try:
        return parse_run_record(decoded(read_bytes(path)))
    except ForeignTextError as error:
        raise MeasurementsError(f"{path}: {error}; give what plan run PLAN --measure FILE wrote") from error
    except MeasurementsError as error:
        raise MeasurementsError(f"{path}: {error}") from error


def parse_run_record(text: str) -> MeasuredRun:
    """The record in a text. Raises `MeasurementsError` if it is not a record."""
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
    """Why numbers of the right form cannot be those of a run; None if they can. Clock errors may put `rest` slightly
    below 0."""
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
    """The text of a file with this record."""
    return json.dumps(asdict(run), indent=1) + "\n"
