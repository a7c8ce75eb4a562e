"""The last recorded prediction errors on each machine, in two small tables beside the profiles.

    fit_errors.csv    profiles against the times of kernels and collectives that they are fitted to
    run_errors.csv    the whole model against published measurements of training runs

The tables are for readers; no price depends on them. Record them anew after a change of the model or of a profile:

    python -m tests.validation.fit_errors
    plan validate RUNS.csv --record hardware_profiles/run_errors.csv
"""

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from hardware_profiles.errors import MeasurementsError
from hardware_profiles.foreign import ForeignTextError, form_fault, parse_csv, read_text

_STRICT = ConfigDict(extra="forbid")
_Count = Annotated[int, Field(ge=0)]
_Size = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """Errors (predicted over measured time, less one) of `rows` kernels or collectives of one `part` of a profile.

    `date` is the day of the record in ISO form, `source` the table that the rows are from.
    """

    __pydantic_config__ = _STRICT

    profile: _Text
    part: _Text
    rows: Annotated[int, Field(ge=1)]
    mean_absolute: _Size
    bias: _Number
    date: _Text
    source: _Text


@dataclass(frozen=True, slots=True, kw_only=True)
class RunError:
    """Errors (predicted over measured, less one) of the training runs in a file `runs` that were made on one machine.

    `rows` runs were evaluated; `timed` of them state a step time, `with_memory` the memory of the fullest device. The
    errors are over those runs, None if there are none. `median_tau` is over the rank groups (see `planner.validation`).
    """

    __pydantic_config__ = _STRICT

    profile: _Text
    rows: _Count
    timed: _Count
    mean_absolute: _Size | None
    bias: _Number | None
    median_tau: _Number | None
    with_memory: _Count
    memory_mean_absolute: _Size | None
    memory_bias: _Number | None
    date: _Text
    runs: _Text


Record = TypeVar("Record", FitError, RunError)

_FILES = {FitError: "fit_errors.csv", RunError: "run_errors.csv"}


def recorded(kind: type[Record], path: Path | None = None) -> tuple[Record, ...]:
    """The records of one kind, from the packaged table or from another file of its form.

    Raises `MeasurementsError` if the file cannot be read, with the place and the reason in one line.
    """
    where = str(path) if path is not None else _FILES[kind]
    try:
        packaged = resources.files("hardware_profiles").joinpath(where)
        lines = list(parse_csv(packaged.read_text(encoding="utf-8") if path is None else read_text(path)))
    except ForeignTextError as error:
        raise MeasurementsError(f"{where}: {error}") from error
    names = [item.name for item in fields(kind)]
    if not lines or lines[0][1] != names:
        raise MeasurementsError(f"{where}: line 1: the columns must be {','.join(names)}")
    found = []
    for number, cells in lines[1:]:
        if len(cells) != len(names):
            raise MeasurementsError(f"{where}: line {number}: {len(cells)} cells under {len(names)} columns")
        values = dict(zip(names, (cell or None for cell in cells), strict=True))
        try:
            found.append(TypeAdapter(kind).validate_python(values))
        except ValidationError as error:
            raise MeasurementsError(f"{where}: line {number}: {form_fault(error)}") from error
    return tuple(found)


def with_records(old: Iterable[Record], new: Iterable[Record]) -> tuple[Record, ...]:
    """Records sorted by profile; `new` replaces the `old` ones of the profiles that it names."""
    records = list(new)
    told = {record.profile for record in records}
    records += [record for record in old if record.profile not in told]
    return tuple(sorted(records, key=lambda record: record.profile))


def dump_records(kind: type[Record], records: Iterable[Record]) -> str:
    """The text of a table; shares with four digits after the point."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = [item.name for item in fields(kind)]
    writer.writerow(names)
    writer.writerows([_cell(getattr(record, name)) for name in names] for record in records)
    return file.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else str(value)
