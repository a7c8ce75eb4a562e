"""What a measured peak counts: the kinds differ by more than the error of a prediction.

    allocated     what tensors take               torch.cuda.max_memory_allocated, "max allocated memory" of Megatron
    reserved      what the allocator has taken    torch.cuda.max_memory_reserved: fragmentation and rounding too
    used          what the device has given       nvidia-smi: context and communication buffers too

The column `peak_mem_kind` states the kind, else words in the notes of a row. If neither does, the peak is compared with
"reserved", and its interval goes from the low end of the first kind to the high end of the last.

A peak is that of the fullest device, unless notes say that the last rank reports it; then it is that of the last
pipeline rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from costmodels import reserved_memory
from hardware_profiles import Bytes, Device, Software
from planner.plan.plan import Prediction
from planner.validation.reading.cells import PEAK_KINDS, PeakKind
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions

KIND_WORDS: Mapping[PeakKind | None, str] = {
    "allocated": "peak as allocated by tensors",
    "reserved": "peak as reserved by the allocator",
    "used": "peak as used on the device",
    None: "peak unknown to be allocated, reserved or used: as reserved, and its interval has all three",
}

_WORDS: Mapping[PeakKind, str] = {
    "used": r"nvidia-smi|npu-smi|used/\d+",
    "reserved": r"reserved",
    "allocated": r"max_memory_allocated|allocated",
}


_LAST_RANK = r"\breported rank\b|\bof the last rank\b"
"""Words for the peak of the last rank, which alone writes what the tests of Megatron-LM compare
(megatron/training/global_vars.py: _set_tensorboard_writer)."""


def is_of_last_rank(row: Row) -> bool:
    """Whether the peak of a row is that of the last rank, and so of the last pipeline rank."""
    return mentions(row.text("notes").lower(), _LAST_RANK)


def kind_of_peak(row: Row) -> PeakKind | None:
    """What the peak of a row counts; None if it does not say. Raises RequestError for an unknown kind."""
    named, notes = row.peak_kind(), row.text("notes").lower()
    return named or next((name for name, words in _WORDS.items() if mentions(notes, words)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Predicted peaks of a run in bytes.

    `tensors` is what is live at one time. `held` is what an allocator holds whose blocks stay when tensors are freed,
    so that tensors that take turns have memory of their own.
    """

    tensors: Bytes
    held: Bytes

    @classmethod
    def of(cls, prediction: Prediction, held: Prediction | None = None, *, last: bool = False) -> "Peaks":
        """The peaks of a run, on its fullest pipeline rank or on the `last` one; without `held` both are those of
        `prediction`."""
        tensors, kept = (
            one.stages[-1].peak_bytes if last and one.stages else one.peak_bytes
            for one in (prediction, held or prediction)
        )
        return cls(tensors=tensors, held=max(tensors, kept))


def peak_of(peaks: Peaks, device: Device, software: Software, kind: PeakKind | None) -> float:
    """The predicted peak in bytes, of the kind that a row counts.

    An allocator never holds more than the device has (`least_needed`).
    """
    outside = reserved_memory(device, software)
    tensors = (peaks.tensors - outside) / (1 + device.allocator_slack)
    if kind == "allocated":
        return tensors
    return max(tensors + outside, min(peaks.held, device.memory)) - (0.0 if kind == "used" else outside)


def least_needed(peaks: Peaks, device: Device, software: Software) -> Bytes:
    """Bytes that a device must have for the run: tensors, and what the device reserves.

    Allocator slack does not count. Before PyTorch's allocator gives up, it returns its cached blocks and asks the
    driver once more (c10/cuda/CUDACachingAllocator.cpp: release_cached_blocks).
    """
    return peak_of(peaks, device, software, "allocated") + reserved_memory(device, software)


def peak_ends(peaks: Peaks, device: Device, software: Software, kind: PeakKind | None) -> tuple[float, float]:
    """The bytes between which the peak of a row should be measured (`Software.peak_low`, `Software.peak_high`)."""
    kinds = PEAK_KINDS if kind is None else (kind,)
    counted = [peak_of(peaks, device, software, each) for each in kinds]
    return software.peak_low * min(counted), software.peak_high * max(counted)
