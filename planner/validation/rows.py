"""Measured training runs as they stand in a CSV file: one row for each, an empty cell where something is unknown.

    id         what it is called     source, profile, device, rank_group, tier, flag     where it is from, how good
    the model  arch, n_layers, hidden, ffn_hidden, n_heads, n_kv_heads, head_dim, vocab, seq_len, n_params_B,
               n_experts, topk, moe_ffn_hidden
    the run    n_devices, precision, tp, sp, cp, ep, pp, vpp, dp, zero_stage, micro_batch, global_batch, recompute, ...
    measured   iter_time_s or tokens_per_s_per_device, peak_mem_GB

A column that is missing is as good as empty, unless nothing can be said without it. Other columns are ignored.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hardware_profiles.foreign import ForeignTextError, parse_csv, read_text
from planner.errors import RequestError, unknown_name

_GIGABYTE = 1e9  # bytes of a column named _GB
_BILLION = 1e9  # parameters of a column named _B

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

RECOMPUTATIONS = ("none", "selective", "full")
_TRUTH = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run. None, and an empty text, stand for unknown. `values` are all cells of the row as they were read."""

    line: int
    values: Mapping[str, str]

    def text(self, column: str) -> str:
        """A word."""
        return self.values.get(column, "").strip()

    def integer(self, column: str, least: int = 1) -> int | None:
        """A whole number that is at least so large. Raises RequestError for anything else."""
        text = self.text(column)
        if not text:
            return None
        number = self._number(column, f"a whole number of {least} or more")
        if number != int(number) or number < least:
            raise self._malformed(column, f"a whole number of {least} or more")
        return int(number)

    def quantity(self, column: str) -> float | None:
        """A number above 0. Raises RequestError for anything else."""
        if not self.text(column):
            return None
        number = self._number(column, "a number above 0")
        if number <= 0:
            raise self._malformed(column, "a number above 0")
        return number

    def truth(self, column: str) -> bool | None:
        """True or False. Raises RequestError for anything else."""
        text = self.text(column).lower()
        if text and text not in _TRUTH:
            raise self._malformed(column, "True or False")
        return _TRUTH[text] if text else None

    def recomputation(self) -> str | None:
        """One of the ways to run a block. Raises RequestError for anything else."""
        text = self.text("recompute")
        if text and text not in RECOMPUTATIONS:
            raise self._malformed("recompute", f"one of {', '.join(RECOMPUTATIONS)}")
        return text or None

    @property
    def id(self) -> str:
        return self.text("id")

    @property
    def measured_seconds(self) -> float | None:
        """Seconds of a step, as given or from the tokens that a device did in a second."""
        seconds = self.quantity("iter_time_s")
        if seconds is not None:
            return seconds
        rate, batch = self.quantity("tokens_per_s_per_device"), self.integer("global_batch")
        length, devices = self.integer("seq_len"), self.integer("n_devices")
        if rate is None or batch is None or length is None or devices is None:
            return None
        return batch * length / (rate * devices)

    @property
    def measured_peak_bytes(self) -> float | None:
        """Bytes on the fullest device, as published."""
        size = self.quantity("peak_mem_GB")
        return None if size is None else size * _GIGABYTE

    @property
    def parameters(self) -> float | None:
        """Parameters of the model, as published."""
        count = self.quantity("n_params_B")
        return None if count is None else count * _BILLION

    def _number(self, column: str, wanted: str) -> float:
        try:
            number = float(self.text(column))
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise self._malformed(column, wanted)
        return number

    def _malformed(self, column: str, wanted: str) -> RequestError:
        return RequestError(f"line {self.line}, column {column}: '{self.text(column)}' is not {wanted}")


_INTEGERS = ("n_layers", "hidden", "ffn_hidden", "n_heads", "n_kv_heads", "head_dim", "vocab", "seq_len", "n_devices")
_EXPERTS = ("topk", "moe_ffn_hidden")
_DEGREES = ("tp", "cp", "ep", "pp", "vpp", "dp", "micro_batch", "global_batch")
_QUANTITIES = ("n_params_B", "iter_time_s", "tokens_per_s_per_device", "peak_mem_GB")


def read_rows(path: Path, where: Mapping[str, str] | None = None, limit: int | None = None) -> tuple[Row, ...]:
    """The rows of a file in its order, those alone whose cells are what `where` says of their columns, at most `limit`.

    Raises RequestError, with line and column, for a file that cannot be understood; the whole file is checked.
    """
    try:
        text = read_text(path)
    except ForeignTextError as error:
        raise RequestError(f"{path}: {error}; give a CSV file of measured runs, in UTF-8") from error
    try:
        rows = tuple(_read(parse_csv(text), where or {}))
    except (ForeignTextError, RequestError) as error:
        raise RequestError(f"{path}: {error}") from error
    return rows[:limit]


def _read(lines: Iterator[tuple[int, list[str]]], where: Mapping[str, str]) -> Iterator[Row]:
    columns = _columns(next(lines, (1, []))[1], where)
    known: dict[str, int] = {}
    for line, cells in lines:
        if len(cells) != len(columns):
            last = columns[min(len(cells), len(columns)) - 1]
            raise RequestError(
                f"line {line}, column {last}: {len(cells)} cells under {len(columns)} columns; quote commas"
            )
        row = Row(line=line, values=dict(zip(columns, cells, strict=True)))
        _check(row, known)
        if all(row.text(column) == value for column, value in where.items()):
            yield row


def _columns(cells: Sequence[str], where: Mapping[str, str]) -> list[str]:
    header = [name.strip() for name in cells]
    for name in REQUIRED:
        if name not in header:
            raise RequestError(f"line 1: there is no column {name}; a file of runs has {', '.join(REQUIRED)}")
    for name in header:
        if header.count(name) > 1:
            raise RequestError(f"line 1, column {name}: it stands there {header.count(name)} times")
    for name in where:
        if name not in header:
            raise RequestError(f"--where {name}=...: {unknown_name('column', name, header)}")
    return header


def _check(row: Row, known: dict[str, int]) -> None:
    """Raise RequestError where a cell is not what its column promises, or a name stands for two rows."""
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
    row.truth("sp")
    row.recomputation()
