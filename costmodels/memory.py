"""Memory of one device: bytes per parameter, and the peak that follows from the bytes that tensors need.

Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020, section 3.1
(mixed precision); gradients are kept in fp32 for accumulation, as Megatron-LM and FSDP2 do.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from costmodels.errors import CostModelError
from costmodels.units import Bytes, QuantityT
from hardware_profiles import PYTORCH, TRAINED, Device, Software

Precision: TypeAlias = Literal["bf16", "fp16", "fp32"]
Optimizer: TypeAlias = Literal["adamw", "sgd", "lamb", "muon"]

_FP32: Bytes = 4
_COMPUTE_BYTES = {name: dtype.nbytes for name, dtype in TRAINED.items()}
MOMENTS_KEPT: dict[str, int] = {"adamw": 2, "sgd": 1, "lamb": 2, "muon": 1}
"""Values per parameter that an optimizer keeps: two moments for AdamW and LAMB, a momentum for SGD and Muon."""

MOMENT_BYTES: dict[str, Bytes] = {"fp32": _FP32, "bf16": 2}
"""Bytes of a moment by the name of its dtype. Updates are always computed in fp32."""

UPDATE_CHUNK = 2**22
"""Parameters that the runtime updates at a time if weights or moments are narrower than fp32: an fp32 copy of one kind
takes 16 MiB."""

CONTEXT: Bytes = 0.5 * 2**30
"""Bytes of a GPU that a process holds before it computes anything: nvidia-smi shows 0.4 to 0.6 GiB for PyTorch on A100
and H100."""

_SECOND_PASS: dict[str, int] = {"lamb": 3, "muon": 7}
"""fp32 values per parameter that pass through memory once more. LAMB knows the length of its step only when all of it
is there, so it writes the direction, and reads it again with the weight: 3. Muon mixes momentum and gradient once more:
2; decays the weight in a pass of its own: 2; writes and reads the orthogonalised update: 3."""


_FOREACH: dict[str, tuple[int, int]] = {"adamw": (6, 14)}
"""Values per parameter that pass through memory if each operator of an optimizer is a kernel over all tensors
(torch/optim/adam.py, _multi_tensor_adam): those of the dtype of the weight, which its gradient has too, and those of
the dtype of the moments. Weight decay 2 and 0; lerp of the first moment with the gradient 1 and 2; second moment scaled
0 and 2, squared gradient added 1 and 2; root 0 and 2, division 0 and 2, addition of eps 0 and 2; weight update 2 and
2."""

_WIDENED = 4
"""fp32 values that pass through memory once more for each value that is kept narrower and widened for the update
kernel: the fp32 copy is written, read by the kernel, written by it, and read to be rounded. The narrow value is read
and written by the conversions instead of the kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateVariant:
    """What a plan may change about the update.

    Attributes:
        narrow_gradients: gradients have the dtype of the weight instead of fp32.
        master_weights: a 16-bit weight has an fp32 master.
        clipped: gradients are clipped before the update.
        moment_dtype: dtype of the moments, see `MOMENT_BYTES`.
    """

    narrow_gradients: bool = False
    master_weights: bool = True
    clipped: bool = False
    moment_dtype: str = "fp32"


PLAIN_UPDATE = UpdateVariant()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterBytes:
    """Bytes per parameter: the weight used in computation, its gradient, and the optimizer's state."""

    weight: Bytes
    gradient: Bytes
    state: Bytes

    @property
    def total(self) -> Bytes:
        """Bytes per parameter of all three."""
        return self.weight + self.gradient + self.state


def parameter_bytes(
    precision: str, optimizer: str, software: Software = PYTORCH, variant: UpdateVariant = PLAIN_UPDATE
) -> ParameterBytes:
    """Bytes per parameter under a precision and an optimizer.

        16-bit: weight 2, gradient 4, state 4 (master weight) + 4 per moment; or as the software keeps them
        fp32:   weight 4, gradient 4, state 4 per moment

    Args:
        precision: "bf16", "fp16" or "fp32".
        optimizer: "adamw", "sgd" (with momentum), "lamb" or "muon" (for a matrix that it updates).
        software: how the software stores weights, masters, gradients and moments. If it offloads, gradients and states
            take no bytes on the device.
        variant: gradients of the dtype of the weight, no master weight, or narrower moments.

    Raises:
        CostModelError: an unknown precision, optimizer or moment dtype.
    """
    weight, moments = _lookup(precision, optimizer)
    gradient, master, moment, stored = _FP32, 0.0, _FP32, software.stored
    if weight < _FP32:
        weight, master, gradient, moment = stored.weight, stored.master, stored.bf16, stored.moment
        if precision == "fp16":
            master, gradient = stored.master + stored.update, stored.fp16
        if variant.narrow_gradients:
            gradient = _COMPUTE_BYTES[precision]
        if not variant.master_weights:
            master = 0.0
    moment = min(moment, _moment_bytes(variant))
    if software.offloaded:
        return ParameterBytes(weight=weight, gradient=0, state=0)
    return ParameterBytes(weight=weight, gradient=gradient, state=master + moment * moments)


def optimizer_traffic(
    precision: str,
    optimizer: str,
    variant: UpdateVariant = PLAIN_UPDATE,
    *,
    foreach: bool = False,
    widened: bool = False,
) -> Bytes:
    """Bytes per parameter that a step of the optimizer reads and writes.

    Reads gradient, fp32 weight and moments; writes fp32 weight and moments, and the 16-bit weight if there is one. LAMB
    and Muon add a second pass. Clipping reads the gradient for its norm, then reads and writes it to scale it.

    Args:
        precision: as in `parameter_bytes`.
        optimizer: as in `parameter_bytes`.
        variant: as in `parameter_bytes`. Weights without a master and narrow moments pass in their own dtype, by a
            kernel that computes in fp32 (Transformer Engine's FusedAdam).
        foreach: operator by operator (`_FOREACH`; AdamW only), not fused. Such operators take every dtype, and the
            gradients of parameters have theirs, so `widened` and narrow gradients change nothing.
        widened: the kernel takes fp32 only, so narrow values are widened before it and rounded after it.

    Raises:
        CostModelError: an unknown precision, optimizer or moment dtype.
    """
    weight, moments = _lookup(precision, optimizer)
    by_operator = foreach and optimizer in _FOREACH
    master, copy = (_FP32, weight if weight < _FP32 else 0) if variant.master_weights else (weight, 0)
    gradient = master if by_operator else weight if variant.narrow_gradients else _FP32
    moment = _moment_bytes(variant)
    again = _SECOND_PASS.get(optimizer, 0) * _FP32 + (3 * gradient if variant.clipped else 0)
    if by_operator:
        of_weight, of_moments = _FOREACH[optimizer]
        return of_weight * master + of_moments * moment + copy + again
    if widened:
        again += _WIDENED * _FP32 * ((master < _FP32) + moments * (moment < _FP32))
    return gradient + 2 * (master + moment * moments) + copy + again


def peak_memory(
    persistent: QuantityT, saved: QuantityT, transient: QuantityT, device: Device, software: Software = PYTORCH
) -> QuantityT:
    """Upper bound on the memory that a device must have, in bytes; element-wise.

        peak = (persistent + saved + transient) (1 + slack) + reserved

    Persistent: weights, gradients, optimizer state. Saved: activations kept for the backward pass, of all micro-batches
    in flight. Transient: the most that is live besides those at any moment. `slack` is `Device.allocator_slack`,
    `reserved` is `reserved_memory`.
    """
    return (persistent + saved + transient) * (1 + device.allocator_slack) + reserved_memory(device, software)


def reserved_memory(device: Device, software: Software = PYTORCH) -> Bytes:
    """Bytes of a device that no tensor gets: the CUDA context, and communication buffers for each process group.

    context + communicators (reserved - context), where context is `CONTEXT`, or the device's `reserved` if that is
    less, and `communicators` is the software's.
    """
    context = min(CONTEXT, device.reserved)
    return context + software.communicators * (device.reserved - context)


def usable_memory(device: Device, software: Software = PYTORCH) -> Bytes:
    """The largest persistent + saved + transient bytes whose `peak_memory` fits the device."""
    return (device.memory - reserved_memory(device, software)) / (1 + device.allocator_slack)


def planned_memory(device: Device, software: Software) -> Bytes:
    """The largest predicted peak of a plan, in bytes: the upper end of its interval still fits the device.

    peak * `Software.peak_high` <= memory.
    """
    return device.memory / software.peak_high


def _moment_bytes(variant: UpdateVariant) -> Bytes:
    if variant.moment_dtype not in MOMENT_BYTES:
        raise CostModelError(f"unknown dtype of moments {variant.moment_dtype!r}; known: {', '.join(MOMENT_BYTES)}")
    return MOMENT_BYTES[variant.moment_dtype]


def _lookup(precision: str, optimizer: str) -> tuple[Bytes, int]:
    if precision not in _COMPUTE_BYTES:
        raise CostModelError(f"unknown precision {precision!r}; known: {', '.join(_COMPUTE_BYTES)}")
    if optimizer not in MOMENTS_KEPT:
        raise CostModelError(f"unknown optimizer {optimizer!r}; known: {', '.join(MOMENTS_KEPT)}")
    return _COMPUTE_BYTES[precision], MOMENTS_KEPT[optimizer]
