"""Measured times of one machine's kernels and collectives, and the file that keeps them.

A measurements file is JSON with exact keys and a `schema_version`. It states when, where and with which software it was
measured, so that every fitted number can state it too. All quantities are SI base units.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from hardware_profiles.device import OP_CLASSES, DeviceType
from hardware_profiles.errors import MeasurementsError
from hardware_profiles.foreign import ForeignTextError, decoded, form_fault, parse_json, read_bytes
from hardware_profiles.units import Bytes, Flops, Seconds

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]
EXTENTS = {"matmul": 3, "attention": 6}
"""Number of extents of a call, for the op classes that have any; see `KernelRow`."""

_STRICT = ConfigDict(extra="forbid")
_WANTED = "give what plan calibrate or plan run --measure writes (plan compare --log reads logs)"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMachine:
    """The machine of the measurements: `processes` ranks of `threads` threads each.

    Each rank has `memory` bytes, of which `reserved` were taken before the first tensor. `compute_units` is as in
    `Device`, `slack` is its `allocator_slack`. `host` is the seconds of an operator whose kernel does almost nothing,
    launched one by one.
    """

    __pydantic_config__ = _STRICT

    name: str
    device_type: DeviceType
    backend: str
    processes: _Count
    threads: _Count
    compute_units: _Count
    memory: Annotated[Bytes, Field(gt=0)]
    reserved: Annotated[Bytes, Field(ge=0)]
    slack: _NotNegative
    host: Annotated[Seconds, Field(ge=0, allow_inf_nan=False)] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One timed pass of one call, while all ranks did the same.

    `op_class` is one of `OP_CLASSES`. `flops`, `bytes_moved` and `kernels` are counted as in the pricing of a plan.
    `extents` are (m, n, k) of a product and (batch, heads, key_heads, queries, keys, head_dim) of attention; other
    classes need none.
    """

    __pydantic_config__ = _STRICT

    op_class: str
    call: str
    direction: Literal["forward", "backward"]
    dtype: str
    extents: tuple[_Count, ...] = ()
    flops: Annotated[Flops, Field(ge=0)]
    bytes_moved: Annotated[Bytes, Field(ge=0)]
    kernels: _Count
    seconds: _Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One timed collective over `devices` neighbours, while all groups of neighbours did the same.

    `message` is in bytes, as in `costmodels.collective_time`. On a CPU, `seconds` is what a collective between two
    products adds to their time.
    """

    __pydantic_config__ = _STRICT

    kind: str
    devices: Annotated[int, Field(ge=2)]
    message: Annotated[Bytes, Field(gt=0)]
    seconds: Annotated[Seconds, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRow:
    """A collective, as in `CollectiveRow`, that was started before products and waited for after them.

    `alone` is the seconds of the collective, `computed` those of the products, which take longer, `together` those of
    both.
    """

    __pydantic_config__ = _STRICT

    kind: str
    devices: Annotated[int, Field(ge=2)]
    message: Annotated[Bytes, Field(gt=0)]
    alone: _Positive
    computed: _Positive
    together: _Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """A whole measurements file: `date` in ISO form, `software` the versions that were used.

    Files from before 27 November 2026 have no `overlaps`.
    """

    __pydantic_config__ = _STRICT

    schema_version: Literal[1]
    date: str
    software: str
    machine: MeasuredMachine
    kernels: tuple[KernelRow, ...]
    collectives: tuple[CollectiveRow, ...]
    overlaps: tuple[OverlapRow, ...] = ()

    @property
    def source(self) -> str:
        """Where the numbers come from, as the source of a fact."""
        machine = self.machine
        ranks = f"{machine.processes} processes of {machine.threads} thread{'s' if machine.threads > 1 else ''}"
        return f"{machine.name}, {self.software}, {machine.backend}, {ranks} at once, {self.date}"


def dump_measurements(measurements: Measurements) -> str:
    """The text of a measurements file, with one row per line."""
    content = asdict(measurements)
    rows = {name: content.pop(name) for name in ("kernels", "collectives", "overlaps")}
    head = json.dumps(content, indent=1, allow_nan=False).removesuffix("\n}")
    lists = (
        f' "{name}": [\n  ' + ",\n  ".join(json.dumps(row, allow_nan=False) for row in some) + "\n ]"
        for name, some in rows.items()
    )
    return head + ",\n" + ",\n".join(lists) + "\n}\n"


def parse_measurements(text: str | bytes, where: str) -> Measurements:
    """Read the text of a measurements file. Raises `MeasurementsError` with the place and the reason in one line."""
    try:
        content = parse_json(decoded(text) if isinstance(text, bytes) else text)
        found = TypeAdapter(Measurements).validate_python(content)
    except ForeignTextError as error:
        raise MeasurementsError(f"{where}: {error}; {_WANTED}") from error
    except ValidationError as error:
        raise MeasurementsError(f"{where}: {form_fault(error)}; {_WANTED}") from error
    for number, row in enumerate(found.kernels):
        wanted = EXTENTS.get(row.op_class, len(row.extents))
        if row.op_class not in OP_CLASSES or len(row.extents) != wanted:
            raise MeasurementsError(
                f"{where}: kernels.{number}: {len(row.extents)} extents of the class '{row.op_class}': classes are"
                f" {', '.join(OP_CLASSES)}, a matmul has {EXTENTS['matmul']} extents, attention {EXTENTS['attention']}"
            )
    return found


def load_measurements(path: str | Path) -> Measurements:
    """Read a measurements file. Raises `MeasurementsError` if it is missing or not a measurements file."""
    try:
        content = read_bytes(path)
    except ForeignTextError as error:
        raise MeasurementsError(f"{path}: {error}; plan calibrate measures and writes such files") from error
    return parse_measurements(content, str(path))
