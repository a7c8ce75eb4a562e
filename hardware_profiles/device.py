"""A device as plain values: memory, peak rates, and the efficiency of its kernels."""

import math
from dataclasses import dataclass, field, fields
from typing import Literal

from hardware_profiles.digests import OPTIONAL_IN_DIGEST
from hardware_profiles.errors import HardwareProfileError, UnknownKeyError
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

POWER_EXPONENT = 0.38
"""Rates of products follow the power limit to this power: large ones in bf16 reach 0.742 of the peak on the A100 PCIe
board, limited to 300 W (SimuMax@4dcaae513b configs/system/a100_pcie.json, median of 122), and 0.828 on the SXM board,
400 W (aiconfigurator@095f58a51, median of 415 of 0.5 ms and more). A voltage that follows the clock would make it
1/3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Achieved share of the peak, in (0, 1], of large kernels of one op class."""

    compute: float
    bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one process on a CPU.

    A kernel costs at least `launch_latency`, and an operator that a framework launches one by one what its host needs
    for that, `host_latency`, before it where the host is the device (`in_line`). `memory` is what the driver leaves of
    the `installed` one (None: it is not known what that leaves, and `memory` is all). Of `memory`, `reserved` is never
    available to tensors (driver context, communication buffers), and `allocator_slack` is the share by which the
    allocator holds more than it hands out.
    `compute_units` is the number of parts that work on one tile of a kernel each (SMs of a GPU, cores of an NPU).
    `matmul_kernels` and `attention_kernels` name dtypes; None says that the class efficiency is all there is.
    `generations` says how many times longer older attention kernels take than those, of heads of 64 elements under a
    name that ends in _64, where these differ; `misaligned` how many times longer
    a 16-bit matrix product takes whose rows are no multiples of 16 bytes. `power_share` is the power limit that is set
    over that of the board whose kernels those are: it costs clock, not peak (see `clock`). `communication_units` are
    the compute units that a collective occupies while it overlaps with computation (see `overlapped`).
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
    generations: tuple[tuple[str, float], ...] = field(default=(), metadata=OPTIONAL_IN_DIGEST)
    power_share: float = field(default=1.0, metadata=OPTIONAL_IN_DIGEST)
    installed: Bytes | None = field(default=None, metadata=OPTIONAL_IN_DIGEST)
    communication_units: float = field(default=0.0, metadata=OPTIONAL_IN_DIGEST)

    def __post_init__(self) -> None:
        own = [(one.name, getattr(self, one.name)) for one in fields(self)]
        for name, value in (*own, *self.peak_flops):
            if isinstance(value, float) and math.isnan(value):
                raise HardwareProfileError(f"device {self.name}: {name} is {value}; give a number")

    @property
    def clock(self) -> float:
        """Share of the rate of products and attention that the power limit leaves, (P / P_board)^x with x the
        `POWER_EXPONENT`; memory keeps its clock."""
        return float(min(1.0, self.power_share**POWER_EXPONENT))

    @property
    def in_line(self) -> bool:
        """Whether what launches a kernel also computes it, so that no launch is ahead of another kernel."""
        return self.device_type == "cpu"

    @property
    def overlapped(self) -> float:
        """Share of the seconds of a collective that costs nothing where it overlaps with computation.

        Its kernels occupy s = communication_units / compute_units of the device, so computation of w seconds beside a
        collective of c seconds takes max(w + s c, c) = s c + max(w, (1 - s) c): s c are exposed, (1 - s) c overlap."""
        return 1.0 - self.communication_units / self.compute_units

    def peak(self, dtype: str) -> FlopsPerSecond:
        """Dense peak for a dtype ("bf16", "fp32", ...); raises `UnknownKeyError` for one that has no figure."""
        for name, value in self.peak_flops:
            if name == dtype:
                return value
        known = ", ".join(name for name, _ in self.peak_flops)
        raise UnknownKeyError(f"device {self.name} has no peak FLOP/s for dtype {dtype!r}; it has {known}")

    def multiplies(self, dtype: str) -> bool:
        """Whether it multiplies matrices of a dtype."""
        return dtype in dict(self.peak_flops) and dtype in dict(self.matmul_kernels)

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

    def attention_slowdown(self, kernels: AttentionKernels, *, narrow: bool = False) -> float:
        """How many times longer than its best ones these kernels take, with heads of 128 elements, or `narrow` ones of
        64; raises `UnknownKeyError` if unknown.

        A profile that says nothing of PyTorch's own ("sdpa", "cudnn") has its figures of them, as those of `plan
        calibrate` are; where it has those of the former alone, PyTorch calls no cuDNN on such a device.
        """
        if kernels == "best":
            return 1.0
        known_times = dict(self.generations)
        if kernels == "cudnn" and kernels not in known_times:
            kernels = "sdpa"
        if kernels in known_times:
            return known_times.get(f"{kernels}_64", known_times[kernels]) if narrow else known_times[kernels]
        if kernels == "sdpa":
            return 1.0
        known = ", ".join(("best", "unfused", *(name for name, _ in self.generations)))
        raise UnknownKeyError(f"device {self.name} has no figure for attention by {kernels}; it has {known}")
