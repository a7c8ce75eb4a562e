"""Statements of a row that contradict each other: the row is refused, because the right one is unknown.

device              another chip, or another memory size, than the profile
global_batch        more tokens a step than any published run: it was counted in tokens
flags               gradients accumulated over another number of micro-batches than make the batch; recomputation that
                    the column `recompute` denies
precision_detail    fp8 products in a 16-bit run
peak_mem_GB         more than the device has: another unit
iter_time_s         less than the model's FLOP take at the peak of all devices
"""

import re

from hardware_profiles import Bytes
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions
from planner.validation.unsupported import UnsupportedError

TOKENS = 2**28
"""Tokens of a step that no published run reaches (DeepSeek-V3 has 2^26)."""

_CHIPS = (
    r"\b(v100|a100|a800|h100|h800|h200|h20|gh200|gb200|gb300|b200|b300|mi\d{3}x?|tpu|trainium\d?|gaudi\d?|l40s?|l4|a10g|rtx|910[abc])"
    r"(?![0-9])"
)
_MEMORY = r"\b(\d{2,3})\s?gb\b(?!/s)"
_OF_GRACE = r"(?<=gh200) (?:120|480)\s?gb\b"
"""What the driver's name of a GH200 of 96 GB counts: the memory of its CPU ("NVIDIA GH200 120GB")."""
_ROUNDED = 0.1  # memory is published in 1e9 or 2^30 bytes, with or without the driver's part
_ACCUMULATED = r"\bgrad(?:ient)?[-_ ]accum(?:ulation)?(?:[-_ ]steps?)?\s*[=: ]\s*(\d{1,7})\b"
_RECOMPUTED = (
    r"recompute[-_]granularity\s*[=: ]\s*\W?(?:full|selective)|(?:gradient|activation)s?[-_ ]checkpointing\s*"
    r"(?:[=: ]\s*(?:true|on|yes|full)|enabled)"
)


def refuse_contradictions(row: Row) -> None:
    """Raise UnsupportedError if statements of a row contradict each other."""
    _check_device(row)
    batch, length = row.integer("global_batch"), row.integer("seq_len")
    if batch and length and batch * length > TOKENS:
        raise UnsupportedError(
            f"global_batch {batch} x seq_len {length} = {batch * length} tokens a step, more than any run had: it is"
            " counted in samples"
        )
    flags = row.text("other_flags").lower()
    _check_accumulation(row, flags)
    if row.recomputation() == "none" and mentions(f"{flags}; {row.text('notes').lower()}", _RECOMPUTED):
        raise UnsupportedError("recompute is none, and flags or notes say that activations are computed again")
    detail = row.text("precision_detail").lower()
    if row.precision() in ("bf16", "fp16", "fp32") and mentions(detail, r"(?:mx)?fp8|float8"):
        raise UnsupportedError(f"precision is {row.text('precision')}, and its detail '{detail:.40}' names fp8")


def refuse_rate(row: Row, flops: float, peak: float) -> None:
    """Raise UnsupportedError if a step is faster than possible: `flops` of the model at the `peak` FLOP/s of all
    devices."""
    seconds, least = row.measured_seconds, flops / peak
    if seconds is not None and seconds < least:
        raise UnsupportedError(
            f"its step took {seconds:.4g} s, and {flops:.3g} FLOP take {least:.4g} s at the peak of all devices:"
            " another unit, or another batch"
        )


def refuse_peak(row: Row, memory: Bytes) -> None:
    """Raise UnsupportedError if the measured peak exceeds the device's `memory` in bytes by more than rounding."""
    peak = row.measured_peak_bytes
    if peak is not None and peak > (1 + _ROUNDED) * memory:
        raise UnsupportedError(
            f"peak_mem_GB is {peak / 1e9:.6g}, and the device has {memory / 1e9:.4g} GB: say its unit, as in 74 GiB"
        )


def _check_device(row: Row) -> None:
    profile, device = row.text("profile").lower(), row.text("device").lower()
    chips = set(re.findall(_CHIPS, device))
    if chips and not any(chip in profile.split("-") for chip in chips):
        raise UnsupportedError(f"device '{row.text('device'):.40}' is none of profile {row.text('profile')}")
    named, own = re.search(_MEMORY, re.sub(_OF_GRACE, "", device)), re.search(r"(\d+)gb$", profile)
    if named and own and abs(int(named[1]) / int(own[1]) - 1) > _ROUNDED:
        raise UnsupportedError(
            f"device '{row.text('device'):.40}' has another memory than profile {row.text('profile')}"
        )


def _check_accumulation(row: Row, flags: str) -> None:
    """Without a pipeline, the accumulated micro-batches of all data-parallel devices must make the batch."""
    said, micro, data = re.search(_ACCUMULATED, flags), row.integer("micro_batch"), row.integer("dp")
    batch = row.integer("global_batch")
    if "mindformers" in row.text("source").lower():  # whose micro-batches are other parts of a batch
        return
    if said and micro and data and batch and (row.integer("pp") or 1) == 1 and int(said[1]) * micro * data != batch:
        raise UnsupportedError(
            f"{said[0]} micro-batches of {micro} on dp {data} make {int(said[1]) * micro * data} samples, not"
            f" global_batch {batch}"
        )
