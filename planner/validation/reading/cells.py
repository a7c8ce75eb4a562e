"""The meaning of a cell in a table of runs: exactly one, or the cell is refused. No ambiguous text is guessed.

whole numbers     4096  4,096  4_096  4.096e3  128Ki (x 1024)      not 128k, which may be 128000 or 131072
quantities        1.35  12,345.6  1,234,567                        not 1,024, which may be 1.024; not ~6000
  n_params_B      70  70B  350M  1.3T                    iter_time_s    1.35  1350 ms  1.35 s  2 min
  peak_mem_GB     79.4  79.4 GB  74 GiB  75776 MiB       tokens_per_s_per_device    12345.6  12345.6 tokens/s
precision         bf16, bfloat16, mixed bf16, fp16, half, fp32, float32, fp8, float8, mxfp8      not amp, int8, nvfp4
truth             True False  yes no  on off  1 0
unknown           an empty cell, n/a, -, ?, unknown
"""

import math
import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

from hardware_profiles.units import GIB, MIB

Attention: TypeAlias = Literal["unfused", "fused", "flash1", "flash2", "latest"]
"""Attention kernels: score matrices in memory; a fused kernel without a name; the first or second generation of
FlashAttention; the newest kernels (FlashAttention-3 and later, cuDNN, Transformer Engine)."""

PeakKind: TypeAlias = Literal["allocated", "reserved", "used"]
PEAK_KINDS: tuple[PeakKind, ...] = ("allocated", "reserved", "used")

_UNKNOWN = frozenset({"", "n/a", "na", "-", "--", "?", "unknown"})
_TRUE, _FALSE = frozenset({"true", "yes", "on", "1"}), frozenset({"false", "no", "off", "0"})
_GROUPED = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")
_AMBIGUOUS = re.compile(r"\d{1,3},\d{3}")  # a thousands separator, or a decimal comma
_NUMBER = re.compile(r"([-+]?[\d,_.]*\d[\d,_.]*(?:[eE][-+]?\d{1,4})?)\s*([A-Za-z/ ]*)")

_SECONDS: Mapping[str, float] = {"s": 1, "sec": 1, "seconds": 1, "ms": 1e-3, "us": 1e-6, "min": 60}
_GIGABYTES: Mapping[str, float] = {"gb": 1, "mb": 1e-3, "gib": GIB / 1e9, "mib": MIB / 1e9}
_BILLIONS: Mapping[str, float] = {"b": 1, "billion": 1, "m": 1e-3, "million": 1e-3, "t": 1e3, "trillion": 1e3}
UNITS: Mapping[str, Mapping[str, float]] = {
    "n_params_B": _BILLIONS,
    "iter_time_s": _SECONDS,
    "peak_mem_GB": _GIGABYTES,
    "tokens_per_s_per_device": {
        f"{word}/{second}{each}": 1
        for word in ("tokens", "tok")
        for second in ("s", "sec")
        for each in ("", "/gpu", "/npu", "/device")
    },
}
"""Units that a column accepts, with their factor to the unit in the column's name."""

UNIT_WORDS: Mapping[str, str] = {
    "n_params_B": "billions, or with M, B or T",
    "iter_time_s": "seconds, or with ms, us, s or min",
    "peak_mem_GB": "1e9 bytes, or with MiB, GiB, MB or GB",
    "tokens_per_s_per_device": "with tokens/s or without",
}
"""How a quantity may be written, for the message when it is written otherwise."""

_WHOLE: Mapping[str, float] = {"ki": 1024}

_STAGES: Mapping[str, int | None] = {
    "none": 0, "no": 0, "off": 0, "false": 0, "no_shard": 0, "ddp": 0,
    "shard_grad_op": 2, "_hybrid_shard_zero2": 2, "hybrid_shard_zero2": 2,
    "full_shard": 3, "hybrid_shard": 3, "hsdp": 3, "fsdp": 3, "fsdp1": 3, "fsdp2": 3,
    "deepspeed": None,
}  # fmt: skip
"""Words for ZeRO. The strategies of FSDP are those of `torch.distributed.fsdp.ShardingStrategy`, which states what each
one shards; the hybrid ones shard within groups (`planner.validation.request.replicas`). FSDP reshards after the forward
pass unless it is told otherwise. None: the stage is not stated."""

_STAGE = re.compile(r"(?:(?:deepspeed\W+)?(?:zero|stage|zero[-_ ]?stage)[-_ ]?)?([0-3])")
_IN_BRACKETS = re.compile(r"([a-z][\w .-]*?)\s*\(([0-3])\)")
"""A stage in brackets after words, which may name another stage."""

_ANY_STAGE = re.compile(r"(?:[\w .-]+[ -])?(?:fsdp[- ]?[12]?|hsdp)")
"""Frameworks that can shard by any stage, although their names alone stand for one."""

_ATTENTION: tuple[tuple[str, Attention], ...] = (
    (r"false|no|off|0|none|eager|math|unfused", "unfused"),
    (r"true|yes|on|1|flash|flash[-_ ]?attention|flash[-_ ]?attn", "fused"),
    (r"fa1|flash[-_ ]?(?:attention|attn)?[-_ ]?v?1|xformers|memory[-_ ]efficient", "flash1"),
    (r"fa2|flex[-_ ]?(?:attention|attn)|sdpa|sdpa fa2|flash[-_ ]?(?:attention|attn)?[-_ ]?v?2", "flash2"),
    (r"fa3|fa4|flash[-_ ]?(?:attention|attn)?[-_ ]?v?[34]|te|te default|transformer engine|cudnn", "latest"),
)
"""Words for attention kernels. The memory-efficient kernel of xFormers, which PyTorch has too, takes the time of
FlashAttention, and FlexAttention that of FlashAttention 2 (Dao 2023, arXiv 2307.08691, figures 4 to 6; "FlexAttention:
The Flexibility of PyTorch with the Performance of FlashAttention", pytorch.org, August 2024)."""

_PRECISIONS: tuple[tuple[str, str], ...] = (
    (r"b(?:f|float)16(?:[- ]mixed)?(?: precision)?|mixed[- ]b(?:f|float)16", "bf16"),
    (r"(?:fp|float)16|half", "fp16"),
    (r"(?:fp|float)32|single", "fp32"),
    (r"(?:mx)?(?:fp|float)8", "fp8"),
)
"""Words for the dtype of computation. "Automatic mixed precision" alone does not state a dtype."""

_PEAKS: Mapping[str, PeakKind] = {
    "max_memory_allocated": "allocated", "memory_allocated": "allocated", "max allocated": "allocated",
    "max_memory_reserved": "reserved", "memory_reserved": "reserved", "max reserved": "reserved",
    "nvidia-smi": "used", "npu-smi": "used",
}  # fmt: skip


class UnclearError(ValueError):
    """A text that may mean several numbers; the message lists them."""


def unknown(text: str) -> bool:
    """Whether a cell says that the value is unknown."""
    return text.lower() in _UNKNOWN


def whole(text: str) -> int:
    """A whole number. Raises ValueError, or UnclearError if the text may mean several numbers."""
    found = _number(text, _WHOLE, decimals=False)
    if found != int(found):
        raise ValueError
    return int(found)


def quantity(text: str, column: str) -> float:
    """A number in the unit of the column's name. Raises: as `whole`."""
    return _number(text, UNITS[column], decimals=True)


def _number(text: str, units: Mapping[str, float], *, decimals: bool) -> float:
    parts = _NUMBER.fullmatch(text)
    if parts is None:
        raise ValueError
    digits, unit = parts[1], parts[2].strip().lower()
    if unit == "k" and not decimals:
        raise UnclearError(f"it may be {digits}000 or {digits} x 1024; write the number, or {digits}Ki for the latter")
    if unit and unit not in units:
        raise ValueError
    if "," in digits:
        if decimals and _AMBIGUOUS.fullmatch(digits):
            raise UnclearError(f"it may be {digits.replace(',', '')} or {digits.replace(',', '.')}; write no comma")
        if not _GROUPED.fullmatch(digits):
            if decimals and digits.count(",") == 1 and "." not in digits:
                raise UnclearError("write a point for its decimals, and no comma")
            raise ValueError
    number = float(digits.replace(",", "")) * units.get(unit, 1)
    if not math.isfinite(number):
        raise ValueError
    return number


def truth(text: str) -> bool:
    """True or False. Raises ValueError for another word."""
    word = text.lower()
    if word not in _TRUE | _FALSE:
        raise ValueError
    return word in _TRUE


def zero_stage(text: str) -> int | None:
    """The ZeRO stage, from 3, ZeRO-3, "fsdp2 (3)" or FULL_SHARD; None for DeepSpeed without a stage.

    Raises ValueError for other words, and for two stages that differ.
    """
    word = text.lower()
    if word in _STAGES:
        return _STAGES[word]
    if (stage := _stage_in(word)) is not None:
        return stage
    if found := _IN_BRACKETS.fullmatch(word):
        words, stage = found[1], int(found[2])
        said = None if _ANY_STAGE.fullmatch(words) else _STAGES.get(words, _stage_in(words))
        if said not in (None, stage):
            raise ValueError
        return stage
    if word.startswith("deepspeed ("):  # "deepspeed (stage in config json)"
        return None
    raise ValueError


def _stage_in(words: str) -> int | None:
    """The stage that words give as a digit, if any."""
    found = _STAGE.fullmatch(words)
    return int(found[1]) if found else None


def precision(text: str) -> str:
    """bf16, fp16, fp32 or fp8. Raises ValueError for another word."""
    word = text.lower()
    for pattern, found in _PRECISIONS:
        if re.fullmatch(pattern, word):
            return found
    raise ValueError


def peak_kind(text: str) -> PeakKind:
    """What a peak counts, from the name of the kind or of the tool that reported it. Raises ValueError for another
    word."""
    word = text.lower()
    found = next((kind for kind in PEAK_KINDS if kind == word), None) or _PEAKS.get(word.removeprefix("torch.cuda."))
    if found is None:
        raise ValueError
    return found


def attention(text: str) -> Attention:
    """The attention kernels that a cell names. Raises ValueError for another word."""
    word = text.lower()
    for pattern, found in _ATTENTION:
        if re.fullmatch(pattern, word):
            return found
    raise ValueError


def layer_counts(text: str) -> tuple[int, ...]:
    """Layers of the stages of a pipeline, first to last: "15 16 16 14". Raises ValueError for anything else."""
    counts = tuple(whole(part) for part in re.split(r"[\s;/|]+", text.strip()))
    if min(counts) < 0:
        raise ValueError
    return counts
