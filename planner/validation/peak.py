"""Which peak a row has measured: what is counted differs by more than what is left to predict.

    allocated     what tensors take               torch.cuda.max_memory_allocated, "max allocated memory" of Megatron
    reserved      what the allocator has taken    torch.cuda.max_memory_reserved: fragmentation and rounding too
    used          what the device has given       nvidia-smi: context and communication buffers too

The column `peak_mem_kind` says so, else words in the notes of a row. Where nobody does, the peak is compared with the
one in the middle, and may be anything from the least of the first to the most of the last.
"""

from collections.abc import Mapping

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


def kind_of_peak(row: Row) -> PeakKind | None:
    """What the peak of a row counts; None where it does not say. Raises RequestError for a word that is no kind."""
    named, notes = row.peak_kind(), row.text("notes").lower()
    return named or next((name for name, words in _WORDS.items() if mentions(notes, words)), None)


def peak_of(prediction: Prediction, device: Device, software: Software, kind: PeakKind | None) -> float:
    """The predicted peak in bytes, counted in the way of a row."""
    if kind == "used":
        return prediction.peak_bytes
    reserved = prediction.peak_bytes - reserved_memory(device, software)
    return reserved / (1 + device.allocator_slack) if kind == "allocated" else reserved


def least_needed(prediction: Prediction, device: Device, software: Software) -> Bytes:
    """Bytes of a device without which a run ends. Before PyTorch's allocator gives up it hands back what it holds for
    later, and asks the driver once more (c10/cuda/CUDACachingAllocator.cpp: release_cached_blocks), so that its slack
    is no need: tensors, and what the device reserves."""
    return peak_of(prediction, device, software, "allocated") + reserved_memory(device, software)


def peak_ends(prediction: Prediction, device: Device, software: Software, kind: PeakKind | None) -> tuple[float, float]:
    """Between which bytes the peak of a row should be measured (`Software.peak_low`, `Software.peak_high`)."""
    kinds = PEAK_KINDS if kind is None else (kind,)
    peaks = [peak_of(prediction, device, software, each) for each in kinds]
    return software.peak_low * min(peaks), software.peak_high * max(peaks)
