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
"""Rates of products are proportional to the power limit to this power. Large products in bf16 reach 0.742 of the peak
on the A100 PCIe board, limited to 300 W (SimuMax@4dcaae513b configs/system/a100_pcie.json, median of 122), and 0.828 on
the SXM board, 400 W (aiconfigurator@095f58a51, median of 415 of 0.5 ms and more). If the voltage followed the clock, it
would be 1/3."""


FLASH_DROPOUT = (1.05, 1.05)
"""Time of FlashAttention-2 with dropout over that without: 0.728 and 0.695 ms, forward and backward together, on GB200
with four sequences of 1,024 tokens and 16 heads of 128 (NVIDIA/TransformerEngine pull request 3313, flash-attn
2.7.4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Share of the peak, in (0, 1], that large kernels of one op class reach."""

    compute: float
    bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one process on a CPU.

    Attributes:
        name: name of the device.
        device_type: "cuda", "npu" or "cpu".
        memory: bytes that the driver leaves of the `installed` ones.
        reserved: bytes of `memory` that tensors never get (driver context, communication buffers).
        allocator_slack: share by which the allocator holds more than it hands out.
        memory_bandwidth: bytes/s.
        launch_latency: the least seconds of a kernel.
        peak_flops: dense peak by dtype, FLOP/s.
        efficiencies: by op class.
        compute_units: units that each work on one tile of a kernel (SMs of a GPU, cores of an NPU).
        matmul_kernels: by dtype; None: use the efficiency of the op class.
        attention_kernels: by dtype; None: use the efficiency of the op class.
        host_latency: seconds that the host needs to launch one operator of a framework. If the host is the device
            (`in_line`), they come before the operator.
        misaligned: how many times longer a 16-bit matrix product takes if its rows are no multiples of 16 bytes.
        generations: how many times longer older attention kernels take than `attention_kernels`; names that end in _64
            are for heads of 64 elements, where these differ.
        dropout: how many times longer `attention_kernels` take, forward and backward, if they drop probabilities; None:
            no figure is known.
        power_share: the power limit over that of the board whose kernels these are; it lowers the clock, not the peak
            (see `clock`).
        installed: bytes of memory on the board; None: unknown what the driver leaves, and `memory` is all of it.
        communication_units: compute units that a collective occupies while it overlaps with computation (see
            `overlapped`).

    Raises:
        HardwareProfileError: a number is NaN.
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
    dropout: tuple[float, float] | None = field(default=None, metadata=OPTIONAL_IN_DIGEST)
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
        """Share of the rate of products and attention that the power limit leaves; the memory clock does not change.

        (P / P_board)^x, with x the `POWER_EXPONENT`, and 1 at most.
        """
        return float(min(1.0, self.power_share**POWER_EXPONENT))

    @property
    def in_line(self) -> bool:
        """Whether the host is the device, as on a CPU: then no kernel is launched ahead while another one runs."""
        return self.device_type == "cpu"

    @property
    def overlapped(self) -> float:
        """Share of a collective's seconds that costs nothing if the collective overlaps with computation.

        Its kernels occupy s = communication_units / compute_units of the device. So computation of w seconds beside a
        collective of c seconds takes max(w + s c, c) = s c + max(w, (1 - s) c): s c are exposed, (1 - s) c overlap.
        """
        return 1.0 - self.communication_units / self.compute_units

    def peak(self, dtype: str) -> FlopsPerSecond:
        """Dense peak of a dtype ("bf16", "fp32", ...), FLOP/s; raises `UnknownKeyError` if there is no figure for
        it."""
        for name, value in self.peak_flops:
            if name == dtype:
                return value
        known = ", ".join(name for name, _ in self.peak_flops)
        raise UnknownKeyError(f"device {self.name} has no peak FLOP/s for dtype {dtype!r}; it has {known}")

    def multiplies(self, dtype: str) -> bool:
        """Whether the device has a peak and a matmul entry for a dtype."""
        return dtype in dict(self.peak_flops) and dtype in dict(self.matmul_kernels)

    def efficiency(self, op_class: str) -> Efficiency:
        """Efficiency of an op class; raises `UnknownKeyError` if there is no figure for it."""
        for name, value in self.efficiencies:
            if name == op_class:
                return value
        known = ", ".join(name for name, _ in self.efficiencies)
        raise UnknownKeyError(f"device {self.name} has no efficiency for op class {op_class!r}; it has {known}")

    def matmul_kernel(self, dtype: str) -> MatmulKernel | None:
        """The matmul kernel of a dtype; None: use the class efficiency. Raises `UnknownKeyError` for an unknown
        dtype."""
        for name, kernel in self.matmul_kernels:
            if name == dtype:
                return kernel
        known = ", ".join(name for name, _ in self.matmul_kernels)
        raise UnknownKeyError(
            f"device {self.name} does not say how it multiplies matrices of {dtype!r}; it has {known}"
        )

    def attention_kernel(self, dtype: str) -> AttentionKernel | None:
        """The attention kernel of a dtype; None: use the class efficiency. Raises `UnknownKeyError` for an unknown
        dtype."""
        for name, kernel in self.attention_kernels:
            if name == dtype:
                return kernel
        known = ", ".join(name for name, _ in self.attention_kernels)
        raise UnknownKeyError(f"device {self.name} does not say how it computes attention in {dtype!r}; it has {known}")

    def attention_slowdown(self, kernels: AttentionKernels, *, narrow: bool = False) -> float:
        """How many times longer these attention kernels take than the device's best ones.

        Heads have 128 elements, or 64 if `narrow`. A profile without a figure for PyTorch's own kernels ("sdpa",
        "cudnn") is fitted to them, as those of `plan calibrate` are. If it has "sdpa" but not "cudnn", PyTorch does not
        call cuDNN on such a device. Raises `UnknownKeyError` for a generation without a figure.
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

    def dropout_slowdown(self, kernels: AttentionKernels) -> tuple[float, float] | None:
        """How many times longer fused attention takes, forward and backward, if it drops probabilities; None if no
        figure is known.

        FlashAttention-2 has one figure for all devices, `FLASH_DROPOUT`; the first generation is taken to be alike.
        """
        return FLASH_DROPOUT if kernels in ("flash1", "flash2", "sdpa") else self.dropout
