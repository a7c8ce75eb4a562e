"""Which peak a row has measured: what is counted differs by more than what is left to predict.

    allocated     what tensors take               torch.cuda.max_memory_allocated, "max allocated memory" of Megatron
    reserved      what the allocator has taken    torch.cuda.max_memory_reserved: fragmentation and rounding too
    used          what the device has given       nvidia-smi: context and communication buffers too

A row says so in its notes, in these words; one that says nothing is taken for "used", which bounds the others.
"""

import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

from hardware_profiles import Device
from planner.plan.plan import Prediction
from planner.validation.rows import Row

Convention: TypeAlias = Literal["allocated", "reserved", "used"]

CONVENTIONS: Mapping[Convention, str] = {
    "allocated": "allocated by tensors",
    "reserved": "reserved by the allocator",
    "used": "used on the device",
}

_WORDS: Mapping[Convention, str] = {
    "used": r"nvidia-smi|npu-smi|used/\d+",
    "reserved": r"reserved",
    "allocated": r"max_memory_allocated|allocated",
}


def convention_of(row: Row) -> Convention:
    """What the peak of a row counts."""
    notes = row.text("notes").lower()
    return next((name for name, words in _WORDS.items() if re.search(words, notes)), "used")


def peak_of(prediction: Prediction, device: Device, convention: Convention) -> float:
    """The predicted peak in bytes, counted in the way of a row."""
    if convention == "used":
        return prediction.peak_bytes
    reserved = prediction.peak_bytes - device.reserved
    return reserved if convention == "reserved" else reserved / (1 + device.allocator_slack)
