"""Measured training runs from a CSV file: one row for each, an empty cell where something is unknown.

    id         what it is called     source, profile, device, rank_group, tier, flag     where it is from, how good
    the model  arch, n_layers, hidden, ffn_hidden, n_heads, n_kv_heads, head_dim, vocab, seq_len, n_params_B,
               n_experts, topk, moe_ffn_hidden
    the run    n_devices, precision, tp, sp, cp, ep, pp, vpp, dp, layers_per_stage, zero_stage, micro_batch,
               global_batch, recompute, stack, ...
    measured   iter_time_s or tokens_per_s_per_device, peak_mem_GB with peak_mem_kind

A missing column is the same as an empty one, unless it is required. Other columns are ignored.
`planner.validation.cells` lists what cells may say. A row with any other cell is refused: it is returned with the
reason, and the other rows are read.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from hardware_profiles import software_names
from hardware_profiles.foreign import ForeignTextError, parse_csv_leniently, read_text
from planner.errors import RequestError, unknown_name
from planner.validation import cells
from planner.validation.cells import PEAK_KINDS, PeakKind
from planner.validation.unsupported import UnsupportedError
from planner.validation.words import mentions, says

_Value = TypeVar("_Value")
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

_FRAMEWORKS = {
    "megatron-lm": "megatron", "megatron-core": "megatron", "megatron core": "megatron", "llmfoundry": "llm-foundry",
    "megatron-deepspeed": "deepspeed", "pytorch fsdp": "fsdp", "fsdp2": "fsdp", "mindspeed-llm": "mindspeed",
    "megatron bridge": "nemo", "megatron-bridge": "nemo", "paddlenlp": "paddle", "paddlepaddle": "paddle",
    "nanotron": "megatron", "transformer engine": "megatron", "transformerengine": "megatron",
    "pytorch ddp": "fsdp", "ddp": "fsdp", "distributeddataparallel": "fsdp",
    "jax": "fsdp-compiled", "maxtext": "fsdp-compiled", "pax": "fsdp-compiled", "paxml": "fsdp-compiled",
    "levanter": "fsdp-compiled", "axlearn": "fsdp-compiled",
    "hugging face transformers": "fsdp", "hugging face": "fsdp", "huggingface": "fsdp", "transformers": "fsdp",
}  # fmt: skip
"""Frameworks of any version, and the stack of each; torchtitan is `fsdp` or `fsdp-compiled`."""

_LATENT = r"(?:multi[-_ ]?(?:head[-_ ])?)?latent[-_ ]attention|(?<![a-z])mla(?![a-z_])"
_WITH_LATENT = (
    r"deepseek[-_ ]?(?:coder[-_ ]?v2|r1(?![-_ ]?(?:zero[-_ ])?distill)|v[2-9]|[2-9](?:\.\d)?(?![\d.]|b(?![a-z0-9])))"
    r"|moonlight|kimi[-_ ]?(?:k[2-9]|vl)|glm[-_ ]?5|minicpm[-_ ]?3"
)
"""Words for multi-head latent attention (first), and models that have it: DeepSeek since V2 (DeepSeek-AI 2024) except
the models that R1 was distilled into, Moonlight, Kimi K2 and its relatives (Moonshot AI 2025), GLM-5 and MiniCPM3, by
their released config files."""

DISAGREEING = 0.1
"""Largest relative difference between the step time and the rate of one row."""

RECOMPUTATIONS = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run; None and empty texts mean unknown.

    `line` is its line in the file, `values` all cells of the row as they were read. `fault` says why the row is
    refused, with line and column.
    """

    line: int
    values: Mapping[str, str]
    fault: str = ""

    def text(self, column: str) -> str:
        """The text of a cell."""
        return self.values.get(column, "").strip()

    def words(self, *columns: str) -> str:
        """The texts of several columns in small letters, separated so that no denial reaches the next column."""
        return "; ".join(map(self.text, columns)).lower()

    def model_and_flags(self) -> str:
        """The words of the model and of all flags, in small letters."""
        return self.words("model", "other_flags", "flag")

    def integer(self, column: str, least: int = 1) -> int | None:
        """A whole number of at least `least`. Raises RequestError for anything else."""
        wanted = f"a whole number of {least} or more"
        number = self._read(column, cells.whole, wanted)
        if number is not None and number < least:
            raise self._malformed(column, wanted)
        return number

    def needed(self, column: str) -> int:
        """A whole number above 0. Raises UnsupportedError for an unknown one, RequestError for anything else."""
        value = self.integer(column)
        if value is None:
            raise UnsupportedError(f"{column} is empty")
        return value

    def quantity(self, column: str) -> float | None:
        """A number above 0, in the unit of the column's name. Raises RequestError for anything else."""
        wanted = f"a number above 0 ({cells.UNIT_WORDS[column]})"
        number = self._read(column, lambda text: cells.quantity(text, column), wanted)
        if number is not None and number <= 0:
            raise self._malformed(column, wanted)
        return number

    def date(self) -> str:
        """When it ran or was published, as 2024-06-30 or a prefix of that; empty if unknown.

        Raises RequestError for anything else, because another form would compare as older or newer than it is.
        """
        text = self.text("date")
        if cells.unknown(text):
            return ""
        if not re.fullmatch(rf"{_DATE}(?:\.\.{_DATE})?", text):
            raise self._malformed("date", "a date as in 2024, 2024-06 or 2024-06-30")
        return text

    def truth(self, column: str) -> bool | None:
        """True or False. Raises RequestError for anything else."""
        return self._read(column, cells.truth, "True or False")

    def recomputation(self) -> str | None:
        """One of `RECOMPUTATIONS`. Raises RequestError for anything else."""
        return self._one_of("recompute", RECOMPUTATIONS)

    def zero_stage(self) -> int | None:
        """0 to 3; None if nothing is stated, and for DeepSpeed without a stage. Raises RequestError."""
        return self._read(
            "zero_stage", cells.zero_stage, "0 to 3, ZeRO-3, fsdp2 (3), FULL_SHARD, SHARD_GRAD_OP or HYBRID_SHARD"
        )

    def attention(self) -> cells.Attention | None:
        """The attention kernels. Raises RequestError for other words."""
        wanted = "True, False, FA1 to FA4, SDPA, cuDNN, TE, FlexAttention or unfused"
        return self._read("flash_attention", cells.attention, wanted)

    @property
    def latent(self) -> bool:
        """Whether attention is multi-head latent attention: as flags say, else by the model."""
        model = self.text("model").lower()
        named = says(self.model_and_flags(), _LATENT)
        return mentions(model, _WITH_LATENT) if named is None else named

    def shares_optimizer(self) -> bool | None:
        """Whether data-parallel devices shard the optimizer states.

        Accepts True, "DeepSpeed ZeRO-1" or "implied by --overlap-param-gather". Raises RequestError for anything else.
        """
        word = self.text("distributed_optimizer").lower()
        if word == "none":
            return False
        if word.startswith("implied") or "zero-1" in word:
            return True
        return self._read("distributed_optimizer", cells.truth, "True, False, or ZeRO-1 by name")

    def layers_per_stage(self) -> tuple[int, ...] | None:
        """Layers of each pipeline stage. Raises RequestError for anything else."""
        return self._read("layers_per_stage", cells.layer_counts, "layers of each stage, as in 15 16 16 14")

    def peak_kind(self) -> PeakKind | None:
        """What the measured peak counts. Raises RequestError for anything else."""
        return self._read("peak_mem_kind", cells.peak_kind, f"one of {', '.join(PEAK_KINDS)}")

    def precision(self) -> str | None:
        """The dtype of computation: bf16, fp16, fp32 or fp8. Raises RequestError for anything else."""
        return self._read("precision", cells.precision, "bf16, fp16, fp32 or fp8")

    def stack(self) -> str | None:
        """The training stack, by its name or by that of the framework. Raises RequestError for an unknown one."""
        name = re.sub(r"[ v]+\d[\d.]*\w*$", "", self.text("stack").lower())
        if cells.unknown(name):
            return None
        if name == "torchtitan":
            return "fsdp-compiled" if self.truth("compile") else "fsdp"
        if name in _FRAMEWORKS:
            return _FRAMEWORKS[name]
        if name not in software_names():
            raise RequestError(
                f"line {self.line}, column stack: {unknown_name('training stack', name, software_names())}"
            )
        return name

    @property
    def id(self) -> str:
        """The name of the run."""
        return self.text("id")

    @property
    def measured_seconds(self) -> float | None:
        """Seconds of a step, as given or from tokens per second and device; None for a refused row."""
        if self.fault:
            return None
        return self.quantity("iter_time_s") or self.seconds_by_rate

    @property
    def seconds_by_rate(self) -> float | None:
        """Seconds of a step from tokens per second and device."""
        rate, batch = self.quantity("tokens_per_s_per_device"), self.integer("global_batch")
        length, devices = self.integer("seq_len"), self.integer("n_devices")
        if rate is None or batch is None or length is None or devices is None:
            return None
        return batch * length / (rate * devices)

    @property
    def measured_peak_bytes(self) -> float | None:
        """Bytes on the fullest device, as published; None for a refused row."""
        if self.fault:
            return None
        size = self.quantity("peak_mem_GB")
        return None if size is None else size * _GIGABYTE

    @property
    def out_of_memory(self) -> bool:
        """Whether the run did not fit."""
        return self.text("tier").upper() == "OOM"

    @property
    def parameters(self) -> float | None:
        """Parameters of the model, as published."""
        count = self.quantity("n_params_B")
        return None if count is None else count * _BILLION

    def _read(self, column: str, read: Callable[[str], _Value], wanted: str) -> _Value | None:
        text = self.text(column)
        if cells.unknown(text):
            return None
        try:
            return read(text)
        except ValueError as error:
            raise self._malformed(column, wanted, str(error) if type(error) is cells.UnclearError else "") from error

    def _one_of(self, column: str, words: Sequence[str]) -> str | None:
        word = self.text(column).lower()
        if not cells.unknown(word) and word not in words:
            raise self._malformed(column, f"one of {', '.join(words)}")
        return word if word in words else None

    def _malformed(self, column: str, wanted: str, reason: str = "") -> RequestError:
        why = f": {reason}" if reason else ""
        return RequestError(f"line {self.line}, column {column}: '{self.text(column):.40}' is not {wanted}{why}")


_DATE = r"20[0-9]{2}(?:-(?:0[1-9]|1[0-2])(?:-(?:0[1-9]|[12][0-9]|3[01]))?)?"

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
