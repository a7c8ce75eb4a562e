"""A device as plain values: memory, peak rates, and the efficiency of its kernels."""

from dataclasses import dataclass, field
from typing import Literal

from hardware_profiles.errors import UnknownKeyError
from hardware_profiles.kernels import AttentionKernel, MatmulKernel
from hardware_profiles.software import AttentionKernels
from hardware_profiles.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds

DeviceType = Literal["cuda", "npu", "cpu"]
OP_CLASSES: tuple[str, ...] = (
    "attention",
    "copy",
    "cross_entropy",
    "elementwise",
    "embedding",
    "matmul",
    "normalisation",
    "optimizer",
)
"""Classes of kernels that a profile gives an efficiency for. The class "view" costs nothing and is in no profile."""

OPTIONAL_IN_DIGEST = {"left out of digests at its default": True}
"""Metadata of a field that is younger than plans that hold digests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Achieved share of the peak, in (0, 1], of large kernels of one op class."""

    compute: float
    bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one process on a CPU.

    A kernel costs at least `launch_latency`, and an operator that a framework launches one by one what its host needs
    for that, `host_latency`. `memory` is what the driver leaves of the `installed` one (None: it is not known what that
    leaves, and `memory` is all). Of `memory`, `reserved` is never available to tensors (driver context,
    communication buffers), and `allocator_slack` is the share by which the allocator holds more than it hands out.
    `compute_units` is the number of parts that work on one tile of a kernel each (SMs of a GPU, cores of an NPU).
    `matmul_kernels` and `attention_kernels` name dtypes; None says that the class efficiency is all there is.
    `generations` says how many times longer older attention kernels take than those; `misaligned` how many times longer
    a 16-bit matrix product takes whose rows are no multiples of 16 bytes.
    """

    name: str
    device_type: DeviceType
    memory: Bytes
    reserved: Bytes
    allocator_slack: float
    memory_bandwidth: BytesPerSecond
    launch_latency: Seconds
    peak_flops: tuple[tuple[str, FlopsPerSecond], ...]
    efficiencies: tuple[tuple[str, Efficiency], ...]
    compute_units: int
    matmul_kernels: tuple[tuple[str, MatmulKernel | None], ...]
    attention_kernels: tuple[tuple[str, AttentionKernel | None], ...]
    host_latency: Seconds = field(default=0.0, metadata=OPTIONAL_IN_DIGEST)
    misaligned: float = field(default=1.0, metadata=OPTIONAL_IN_DIGEST)
    generations: tuple[tuple[AttentionKernels, float], ...] = field(default=(), metadata=OPTIONAL_IN_DIGEST)
    installed: Bytes | None = field(default=None, metadata=OPTIONAL_IN_DIGEST)

    def peak(self, dtype: str) -> FlopsPerSecond:
        """Dense peak for a dtype ("bf16", "fp32", ...); raises `UnknownKeyError` for one that has no figure."""
        for name, value in self.peak_flops:
            if name == dtype:
                return value
        known = ", ".join(name for name, _ in self.peak_flops)
        raise UnknownKeyError(f"device {self.name} has no peak FLOP/s for dtype {dtype!r}; it has {known}")

    def efficiency(self, op_class: str) -> Efficiency:
        """Efficiency of an op class; raises `UnknownKeyError` for one that has no figure."""
        for name, value in self.efficiencies:
            if name == op_class:
                return value
        known = ", ".join(name for name, _ in self.efficiencies)
        raise UnknownKeyError(f"device {self.name} has no efficiency for op class {op_class!r}; it has {known}")

    def matmul_kernel(self, dtype: str) -> MatmulKernel | None:
        """How it multiplies matrices of a dtype; None: by class efficiency. Raises `UnknownKeyError` if unknown."""
        for name, kernel in self.matmul_kernels:
            if name == dtype:
                return kernel
        known = ", ".join(name for name, _ in self.matmul_kernels)
        raise UnknownKeyError(
            f"device {self.name} does not say how it multiplies matrices of {dtype!r}; it has {known}"
        )

    def attention_kernel(self, dtype: str) -> AttentionKernel | None:
        """How it computes attention in a dtype; None: by class efficiency. Raises `UnknownKeyError` if unknown."""
        for name, kernel in self.attention_kernels:
            if name == dtype:
                return kernel
        known = ", ".join(name for name, _ in self.attention_kernels)
        raise UnknownKeyError(f"device {self.name} does not say how it computes attention in {dtype!r}; it has {known}")

    def attention_slowdown(self, kernels: AttentionKernels) -> float:
        """How many times longer than its best ones these kernels take; raises `UnknownKeyError` if unknown."""
        if kernels == "best":
            return 1.0
        for name, value in self.generations:
            if name == kernels:
                return value
        known = ", ".join(("best", "unfused", *(name for name, _ in self.generations)))
        raise UnknownKeyError(f"device {self.name} has no figure for attention by {kernels}; it has {known}")
