"""Reads a file of measured runs, checks its rows, and notes what was read of them.

A row with a cell that says nothing known is refused: it is returned with the reason, and the other rows are read.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hardware_profiles.foreign import ForeignTextError, parse_csv_leniently, read_text
from planner.errors import RequestError, unknown_name
from planner.validation.reading import cells
from planner.validation.reading.rows import Row

REQUIRED = (
    "id",
    "profile",
    "n_layers",
    "hidden",
    "n_heads",
    "vocab",
    "seq_len",
    "n_devices",
    "tp",
    "pp",
    "global_batch",
)
"""Columns that a file must have."""

DISAGREEING = 0.1
"""Largest relative difference between the step time and the rate of one row."""

_MEASURED = re.compile(
    r"(?:step|iter\w*)_?time|throughput|(?:samples|seqs?|sequences|tokens)_per|tflops|mfu|peak|memory"
)

_INTEGERS = ("n_layers", "hidden", "ffn_hidden", "n_heads", "n_kv_heads", "head_dim", "vocab", "seq_len", "n_devices")
_EXPERTS = ("topk", "moe_ffn_hidden")
_DEGREES = ("devices_per_node", "tp", "cp", "ep", "pp", "vpp", "dp", "micro_batch", "global_batch")
_QUANTITIES = tuple(cells.UNITS)
_TEXTS = (
    "id", "source", "profile", "device", "rank_group", "tier", "flag", "arch", "n_experts", "sp", "zero_stage",
    "distributed_optimizer", "recompute", "recompute_detail", "precision", "precision_detail", "stack", "date",
    "compile", "flash_attention", "other_flags", "inter_bw", "intra_bw", "peak_mem_kind", "source_locator",
    "layers_per_stage",
)  # fmt: skip
COLUMNS = (*_TEXTS, *_INTEGERS, *_EXPERTS, *_DEGREES, *_QUANTITIES)
"""Columns that are read; `model` and `notes` are free text and not listed."""


def read_rows(
    path: Path, where: Mapping[str, str] | None = None, limit: int | None = None, *, strict: bool = False
) -> tuple[Row, ...]:
    """The rows of a file in its order, at most `limit`, and only those whose cells equal the values in `where`.

    A row is returned with its `fault` if a cell has an illegal value, if its name is taken, or if it has too many or
    too few cells. Rows of empty cells are left out. Raises RequestError for a file without such rows, and for the first
    faulty row if `strict`.
    """
    try:
        text = read_text(path)
    except ForeignTextError as error:
        raise RequestError(f"{path}: {error}; give a CSV file of measured runs, in UTF-8") from error
    try:
        rows = tuple(_read(parse_csv_leniently(text), where or {}, strict))
    except (ForeignTextError, RequestError) as error:
        raise RequestError(f"{path}: {error}") from error
    return rows[:limit]


def sampled(rows: Sequence[Row], most: int) -> tuple[Row, ...]:
    """At most `most` rows of each source, in their order: drawn at random, but the same ones every time."""
    sources: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        sources.setdefault(row.text("source"), []).append(place)
    chosen = {
        place
        for source, places in sources.items()
        for place in (places if len(places) <= most else random.Random(source).sample(places, most))
    }
    return tuple(row for place, row in enumerate(rows) if place in chosen)


def readings_of(row: Row) -> tuple[str, ...]:
    """Notes on cells whose numbers are not written plainly, and how they are read."""
    found = []
    for column in (*_INTEGERS, "n_experts", *_EXPERTS, *_DEGREES, *_QUANTITIES):
        text = row.text(column)
        if not text or text.replace(".", "", 1).isdecimal():
            continue
        value = row.quantity(column) if column in _QUANTITIES else row.integer(column, least=0)
        found.append(f"{column} '{text:.40}' read as {'unknown' if value is None else format(value, '.10g')}")
    return tuple(found)


def unread_of(row: Row) -> tuple[str, ...]:
    """A note that no measurement is read from a row whose measured columns have other names; else empty.

    FLOP/s and their share of the peak are not read, because sources count them differently.
    """
    if row.measured_seconds is not None or row.measured_peak_bytes is not None:
        return ()
    found = [name for name, text in row.values.items() if _MEASURED.search(name.lower()) and text.strip()]
    read = "iter_time_s, tokens_per_s_per_device and peak_mem_GB are read"
    return (f"nothing measured is read of {', '.join(found)}: {read}",) if found else ()


def _read(lines: Iterator[tuple[int, list[str] | str]], where: Mapping[str, str], strict: bool) -> Iterator[Row]:
    lines = (one for one in lines if isinstance(one[1], str) or any(cell.strip() for cell in one[1]))
    first, header = next(lines, (1, []))
    columns = _columns(first, header, where)
    known: dict[str, int] = {}
    met: dict[str, set[str]] = {column: set() for column in where}
    none = True
    for line, values in lines:
        row = Row(line=line, values={} if isinstance(values, str) else dict(zip(columns, values, strict=False)))
        whole = len(values) == len(columns) and not isinstance(values, str)
        for column, words in met.items():
            words.add(row.text(column))
        # cells of a ragged row cannot be assigned to columns: it is shown, whatever `where`
        chosen = not whole or all(row.text(column) == value for column, value in where.items())
        if not chosen and not strict:
            continue
        try:
            if isinstance(values, str):
                raise RequestError(f"line {line}: {values}")
            if not whole:
                raise RequestError(_ragged(line, columns, len(values)))
            _check_unnamed(line, columns, values)
            _check(row, known)
        except RequestError as error:
            if strict:
                raise
            row = replace(row, fault=str(error))
        if chosen:
            none = False
            yield row
    if none:
        raise RequestError(_nothing(where, met))


def _nothing(where: Mapping[str, str], met: Mapping[str, set[str]]) -> str:
    """Why no row is left."""
    for column, value in where.items():
        found = sorted(met[column] - {""})
        if found and value not in met[column]:
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            return f"--where {column}={value}: no row has that; {column} is {', '.join(found[:_SHOWN])}{more} there"
    asked = " and ".join(f"{column}={value}" for column, value in where.items())
    return f"--where: no row has {asked}" if asked else "it has no runs; write one in each line below the columns"


_SHOWN = 8  # values of a column in a message


def _ragged(line: int, columns: Sequence[str], count: int) -> str:
    place = min(count, len(columns))
    return (
        f"line {line}, column {columns[place - 1] or place}: {count} cells under {len(columns)} columns; quote commas"
    )


def _check_unnamed(line: int, columns: Sequence[str], values: Sequence[str]) -> None:
    """Raise RequestError for a cell under a column without a name: an extra comma has shifted the cells."""
    for place, (name, value) in enumerate(zip(columns, values, strict=True), start=1):
        if not name and value.strip():
            raise RequestError(f"line {line}: '{value.strip():.40}' stands in column {place}, which has no name")


def _columns(line: int, values: Sequence[str] | str, where: Mapping[str, str]) -> list[str]:
    if isinstance(values, str):
        raise RequestError(f"line {line}: {values}")
    header = [name.strip() for name in values]
    if not header:
        raise RequestError(f"it is empty; a file of runs has {', '.join(REQUIRED)}")
    for separator, name in ((";", "semicolons"), ("\t", "tabs")):
        if not any(column in header for column in REQUIRED) and any(separator in cell for cell in values):
            raise RequestError(f"line {line}: its cells are separated by {name}; separate them by commas")
    spelled = {re.sub(r"\W|_", "", name).lower(): name for name in (*COLUMNS, "model", "notes")}
    for name in header:
        meant = spelled.get(re.sub(r"\W|_", "", name).lower(), name)
        if name != meant and meant not in header:
            raise RequestError(f"line {line}: there is no column {meant}, but '{name:.40}'; write {meant}")
    missing = [name for name in REQUIRED if name not in header]
    if missing:
        others = f"; a file of runs has {', '.join(REQUIRED)}" if len(missing) < len(REQUIRED) else ""
        raise RequestError(f"line {line}: there is no column {', '.join(missing)}{others}")
    for name in header:
        if name and header.count(name) > 1:
            raise RequestError(f"line {line}, column {name}: it stands there {header.count(name)} times")
    for name in where:
        if name not in header:
            raise RequestError(f"--where {name}=...: {unknown_name('column', name, header)}")
    return header


def _check(row: Row, known: dict[str, int]) -> None:
    """Raise RequestError if a cell has an illegal value, or if two rows have the same name."""
    if not row.id:
        raise RequestError(f"line {row.line}, column id: it is empty; every row needs a name")
    if row.id in known:
        raise RequestError(f"line {row.line}, column id: '{row.id}' is the name of line {known[row.id]} too")
    known[row.id] = row.line
    for column in (*_INTEGERS, *_EXPERTS, *_DEGREES):
        row.integer(column)
    row.integer("n_experts", least=0)
    for column in _QUANTITIES:
        row.quantity(column)
    for column in ("sp", "compile"):
        row.truth(column)
    row.date()
    row.recomputation()
    _check_times(row)
    row.zero_stage()
    row.attention()
    row.shares_optimizer()
    row.layers_per_stage()
    row.peak_kind()
    row.precision()
    row.stack()


def _check_times(row: Row) -> None:
    """Raise RequestError if a row states two different step times."""
    given, rated = row.quantity("iter_time_s"), row.seconds_by_rate
    if given is not None and rated is not None and abs(rated / given - 1) > DISAGREEING:
        raise RequestError(
            f"line {row.line}, column tokens_per_s_per_device: {row.text('tokens_per_s_per_device'):.40} makes a step"
            f" of {rated:.4g} s, and iter_time_s is {given:.4g}"
        )
