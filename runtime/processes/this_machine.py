"""The device of this process, and the memory that it has used."""

import os
import platform
import re
import sys
from pathlib import Path

import torch

from hardware_profiles import HardwareProfileError, parts_of
from planner.plan.binding.machine import machine_of
from planner.plan.compare.measured import predicted_peak
from planner.plan.plan import ClusterReference, Prediction


def device_name(device: torch.device) -> str:
    """The system's name of the device; for a CPU the processor and its cores."""
    if device.type != "cpu":
        return str(torch.get_device_module(device).get_device_name(device))
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{named[0] if named else platform.machine()}, {os.cpu_count()} cores"


def resident_bytes() -> float:
    """Peak resident bytes of this process so far."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def peak_memory(device: torch.device) -> tuple[str, float]:
    """The kind of memory that is counted, and this process's peak: tensors on an accelerator, else resident memory."""
    if device.type == "cpu":
        return "resident, Python and PyTorch included", resident_bytes()
    return "allocated", float(torch.accelerator.max_memory_allocated(device))


def predicted_memory(prediction: Prediction, device: torch.device) -> float:
    """The prediction for `peak_memory`."""
    return predicted_peak(prediction, device.type)


def elsewhere(reference: ClusterReference, device: torch.device) -> str:
    """Why a plan's profile is not of this machine; empty where it is."""
    try:
        profiles = [part.device for part in parts_of(machine_of(reference))]
    except HardwareProfileError:
        return "that profile is not on this machine"
    name = device_name(device)
    for profile in profiles:
        alike = profile.name.startswith(name) or _codes(profile.name) & _codes(name)
        if profile.device_type == device.type and alike:
            return ""
    names = " and ".join(dict.fromkeys(profile.name for profile in profiles))
    return f"the profile is of {names}, but this machine has {name}: make a profile of it with plan calibrate"


def _codes(name: str) -> set[str]:
    """Words with letters and two digits or more, as H100, without sizes: they identify an accelerator across names."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return {word for word in words if re.fullmatch(r"(?=.*[a-z])(?=.*\d\d).*(?<!gb)", word)}
