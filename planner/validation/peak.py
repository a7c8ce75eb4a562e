"""Which peak a row has measured: what is counted differs by more than what is left to predict.

    allocated     what tensors take               torch.cuda.max_memory_allocated, "max allocated memory" of Megatron
    reserved      what the allocator has taken    torch.cuda.max_memory_reserved: fragmentation and rounding too
    used          what the device has given       nvidia-smi: context and communication buffers too

The column `peak_mem_kind` says so, else words in the notes of a row. Where nobody does, the peak is compared with the
one in the middle, and may be anything from the least of the first to the most of the last.

A peak is that of the fullest device, unless notes say that the last rank reports it: of a pipeline then the last one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from costmodels import reserved_memory
from hardware_profiles import Bytes, Device, Software
from planner.plan.plan import Prediction
from planner.validation.cells import PEAK_KINDS, PeakKind
from planner.validation.rows import Row
from planner.validation.words import mentions

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
    """Whether the peak of a row is that of the last rank, and of the last pipeline rank with it."""
    return mentions(row.text("notes").lower(), _LAST_RANK)


def kind_of_peak(row: Row) -> PeakKind | None:
    """What the peak of a row counts; None where it does not say. Raises RequestError for a word that is no kind."""
    named, notes = row.peak_kind(), row.text("notes").lower()
    return named or next((name for name, words in _WORDS.items() if mentions(notes, words)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Predicted bytes of a run: of the `tensors` that are there at one time, and as they are `held` by an allocator
    whose blocks stay when tensors go, so that what comes and goes by turns has memory of its own."""

    tensors: Bytes
    held: Bytes

    @classmethod
    def of(cls, prediction: Prediction, held: Prediction | None = None, *, last: bool = False) -> "Peaks":
        """Of a run of which both are predicted, or the same; of its fullest pipeline rank, or of the `last`."""
        tensors, kept = (
            one.stages[-1].peak_bytes if last and one.stages else one.peak_bytes
            for one in (prediction, held or prediction)
        )
        return cls(tensors=tensors, held=max(tensors, kept))


def peak_of(peaks: Peaks, device: Device, software: Software, kind: PeakKind | None) -> float:
    """The predicted peak in bytes, counted in the way of a row. An allocator holds no more for later than there is
    (`least_needed`)."""
    outside = reserved_memory(device, software)
    tensors = (peaks.tensors - outside) / (1 + device.allocator_slack)
    if kind == "allocated":
        return tensors
    return max(tensors + outside, min(peaks.held, device.memory)) - (0.0 if kind == "used" else outside)


def least_needed(peaks: Peaks, device: Device, software: Software) -> Bytes:
    """Bytes of a device without which a run ends. Before PyTorch's allocator gives up it hands back what it holds for
    later, and asks the driver once more (c10/cuda/CUDACachingAllocator.cpp: release_cached_blocks), so that its slack
    is no need: tensors, and what the device reserves."""
    return peak_of(peaks, device, software, "allocated") + reserved_memory(device, software)


def peak_ends(peaks: Peaks, device: Device, software: Software, kind: PeakKind | None) -> tuple[float, float]:
    """Between which bytes the peak of a row should be measured (`Software.peak_low`, `Software.peak_high`)."""
    kinds = PEAK_KINDS if kind is None else (kind,)
    counted = [peak_of(peaks, device, software, each) for each in kinds]
    return software.peak_low * min(counted), software.peak_high * max(counted)
