"""Memory of one device: bytes per parameter, and what the allocator makes of the bytes that tensors need.

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
"""Values per parameter that an optimizer keeps: AdamW and LAMB two moments, SGD and Muon their momentum."""

MOMENT_BYTES: dict[str, Bytes] = {"fp32": _FP32, "bf16": 2}
"""Bytes of a moment by the word for its dtype. Updates are computed in fp32 whatever it is."""

UPDATE_CHUNK = 2**22
"""Parameters that the runtime updates at a time where weights or moments are narrower than fp32: an fp32 copy of one
kind takes 16 MiB."""

CONTEXT: Bytes = 0.5 * 2**30
"""What a process that has computed nothing holds of a GPU: nvidia-smi shows 0.4 to 0.6 GiB for PyTorch on A100 and
H100."""

_SECOND_PASS: dict[str, int] = {"lamb": 3, "muon": 7}
"""fp32 values per parameter that pass through memory once more: LAMB knows the length of its step when all of it is
there, so it writes the direction, and reads it with the weight again. Muon draws its momentum to the gradient and the
gradient to its momentum, 2 more; decays the weight by itself, 2; writes and reads what is made orthogonal, 3."""


_FOREACH: dict[str, tuple[int, int]] = {"adamw": (6, 14)}
"""Values per parameter, of the dtype of the weight and of that of the moments, that pass through memory where each
operator of an optimizer is a kernel over all tensors (torch/optim/adamw.py, _multi_tensor_adamw): weight decayed 2 and
0; first moment drawn to the gradient 1 and 2; second one scaled 0 and 2, and added to 1 and 2; its root 0 and 2,
divided 0 and 2, added to 0 and 2; weight changed 2 and 2."""

_WIDENED = 4
"""fp32 values that pass through memory once more for what is kept narrower and widened for the kernel of the update:
the fp32 copy is written, read by the kernel, written by it, and read to be rounded. The kernel no longer touches what
is kept, which is read and written for that instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateVariant:
    """What a plan may change about the update: gradients of the dtype of the weight instead of fp32, no fp32 master of
    a 16-bit weight, gradients that are clipped before, moments of another dtype (see `MOMENT_BYTES`)."""

    narrow_gradients: bool = False
    master_weights: bool = True
    clipped: bool = False
    moment_dtype: str = "fp32"


PLAIN_UPDATE = UpdateVariant()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterBytes:
    """Bytes per parameter: the weight that is computed with, its gradient, and the optimizer's state."""

    weight: Bytes
    gradient: Bytes
    state: Bytes

    @property
    def total(self) -> Bytes:
        return self.weight + self.gradient + self.state


def parameter_bytes(
    precision: str, optimizer: str, software: Software = PYTORCH, variant: UpdateVariant = PLAIN_UPDATE
) -> ParameterBytes:
    """Bytes per parameter under a precision ("bf16", "fp16", "fp32") and an optimizer ("adamw", "sgd" with momentum,
    "lamb", "muon" for a matrix that it updates).

        16-bit: weight 2, gradient 4, state 4 (master weight) + 4 per moment; or as the software keeps them
        fp32:   weight 4, gradient 4, state 4 per moment

    A variant has gradients of the dtype of the weight, no master weight, or narrower moments. Of what is offloaded,
    gradients and states, nothing is on the device. Raises `CostModelError` for any other word.
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
    """Bytes per parameter that a step of the optimizer reads and writes: fused, or operator by operator (`foreach`).

    reads gradient, fp32 weight and moments; writes fp32 weight and moments, and the 16-bit weight if there is one;
    what a second pass moves (LAMB); clipping reads the gradient for its norm, and reads and writes it to scale it

    Weights without a master and moments pass as they are kept, by a kernel that computes in fp32 (Transformer Engine's
    FusedAdam). `widened`: by one that takes fp32 alone, before and behind which they are widened and rounded.
    """
    weight, moments = _lookup(precision, optimizer)
    gradient = weight if variant.narrow_gradients else _FP32
    master, copy = (_FP32, weight if weight < _FP32 else 0) if variant.master_weights else (weight, 0)
    moment = _moment_bytes(variant)
    again = _SECOND_PASS.get(optimizer, 0) * _FP32 + (3 * gradient if variant.clipped else 0)
    if foreach and optimizer in _FOREACH:
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
    in flight. Transient: the most that is live beside those at any moment. Slack is the device's, reserved what
    `reserved_memory` says.
    """
    return (persistent + saved + transient) * (1 + device.allocator_slack) + reserved_memory(device, software)


def reserved_memory(device: Device, software: Software = PYTORCH) -> Bytes:
    """Bytes of a device that no tensor gets: a context, and the rest of what the device reserves for each of the
    process groups that the software creates; no more than that where it has less."""
    context = min(CONTEXT, device.reserved)
    return context + software.communicators * (device.reserved - context)


def usable_memory(device: Device, software: Software = PYTORCH) -> Bytes:
    """The most that persistent + saved + transient may be for `peak_memory` to fit the device."""
    return (device.memory - reserved_memory(device, software)) / (1 + device.allocator_slack)


def planned_memory(device: Device, software: Software) -> Bytes:
    """The most that the predicted peak of a plan may be, in bytes: with it the upper end of its interval still fits,
    peak * `Software.peak_high` <= memory."""
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
