"""Machines as facts: devices and the networks between them, every number with its source. Imports nothing of ours."""

from hardware_profiles.cluster import (
    OP_CLASSES,
    Cluster,
    Device,
    Efficiency,
    Fact,
    Group,
    Level,
    Protocol,
    Span,
)
from hardware_profiles.errors import (
    HardwareProfileError,
    InvalidProfileError,
    TopologyError,
    UnknownKeyError,
    UnknownProfileError,
)
from hardware_profiles.kernels import AttentionKernel, MatmulKernel
from hardware_profiles.load import load_profile, profile_names
from hardware_profiles.units import GB, GIB, KB, KIB, MB, MIB, Bytes, BytesPerSecond, Flops, FlopsPerSecond, Seconds

__all__ = [
    "AttentionKernel",
    "Bytes",
    "BytesPerSecond",
    "Cluster",
    "Device",
    "Efficiency",
    "Fact",
    "Flops",
    "FlopsPerSecond",
    "GB",
    "GIB",
    "Group",
    "HardwareProfileError",
    "InvalidProfileError",
    "KB",
    "KIB",
    "Level",
    "MB",
    "MIB",
    "MatmulKernel",
    "OP_CLASSES",
    "Protocol",
    "Seconds",
    "Span",
    "TopologyError",
    "UnknownKeyError",
    "UnknownProfileError",
    "load_profile",
    "profile_names",
]
