"""Machines as facts: devices and the networks between them, every number with its source. Imports nothing of ours."""

from hardware_profiles.accuracy import FitError, RunError, dump_records, recorded, with_records
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
from hardware_profiles.compose import LevelChoice, compose, parse_levels, with_network
from hardware_profiles.errors import (
    HardwareProfileError,
    InvalidProfileError,
    MeasurementsError,
    TopologyError,
    UnknownKeyError,
    UnknownProfileError,
)
from hardware_profiles.host import HOMES, Home, Host, Store
from hardware_profiles.intervals import Spread, machines_of, spread_of
from hardware_profiles.kernels import AttentionKernel, MatmulKernel
from hardware_profiles.load import load_profile, profile_names
from hardware_profiles.measurements import (
    CollectiveRow,
    KernelRow,
    MeasuredMachine,
    Measurements,
    dump_measurements,
    load_measurements,
    parse_measurements,
)
from hardware_profiles.parameters import Parameter, fitted_parameters
from hardware_profiles.software import PYTORCH, AttentionKernels, Hidden, LossMemory, Software, Stored
from hardware_profiles.stacks import load_software, software_facts, software_names
from hardware_profiles.units import GB, GIB, KB, KIB, MB, MIB, Bytes, BytesPerSecond, Flops, FlopsPerSecond, Seconds
from hardware_profiles.write import Origin, dump_profile

__all__ = [
    "AttentionKernel",
    "AttentionKernels",
    "Bytes",
    "BytesPerSecond",
    "Cluster",
    "CollectiveRow",
    "Device",
    "Efficiency",
    "Fact",
    "FitError",
    "Flops",
    "FlopsPerSecond",
    "GB",
    "GIB",
    "Group",
    "HOMES",
    "HardwareProfileError",
    "Hidden",
    "Home",
    "Host",
    "InvalidProfileError",
    "KB",
    "KIB",
    "KernelRow",
    "Level",
    "LevelChoice",
    "LossMemory",
    "MB",
    "MIB",
    "MatmulKernel",
    "MeasuredMachine",
    "Measurements",
    "MeasurementsError",
    "OP_CLASSES",
    "Origin",
    "PYTORCH",
    "Parameter",
    "Protocol",
    "RunError",
    "Seconds",
    "Software",
    "Span",
    "Spread",
    "Store",
    "Stored",
    "TopologyError",
    "UnknownKeyError",
    "UnknownProfileError",
    "compose",
    "dump_measurements",
    "dump_profile",
    "dump_records",
    "fitted_parameters",
    "load_measurements",
    "load_profile",
    "load_software",
    "machines_of",
    "parse_levels",
    "parse_measurements",
    "profile_names",
    "recorded",
    "software_facts",
    "software_names",
    "spread_of",
    "with_network",
    "with_records",
]
