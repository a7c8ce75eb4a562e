"""An operator as its kernels are priced: rule, local extents and machine; and helpers that several kernels share."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from costmodels import AttentionShape, Quantity, element_bytes, operator_time
from hardware_profiles import DTYPES, Device, Software
from planner.sharding.rule import Rule

Array: TypeAlias = NDArray[np.float64]

WORD = 16
"""Bytes of a word in which tensor cores load operands."""

SHORT = frozenset({"bf16", "fp16"})
"""Dtypes of 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelCall:
    """An operator under K strategies.

    `extents` has the local extents of its factors (K, factors); `flops`, `moved` and `moved_backward` have FLOP and
    bytes of the forward pass, and bytes of the backward pass, (K,). `graded` are the operands that need a gradient.
    `hops` are those of a ring, 1 without; `uneven` is the work of the ring's busiest device relative to the mean; (K,)
    each."""

    rule: Rule
    extents: Array
    dtype: str
    device: Device
    software: Software
    graded: tuple[int, ...]
    flops: Array
    moved: Array
    moved_backward: Array
    hops: Array
    uneven: Array

    @property
    def multiplied(self) -> str:
        """The dtype in which matrices are multiplied."""
        return multiplied_in(self.software, self.dtype)

    @property
    def worked(self) -> int:
        """The number of operands whose gradients need work: those of addends do not."""
        return sum(operand not in self.rule.addends for operand in self.graded)

    def extent(self, factors: frozenset[int] | tuple[int, ...]) -> Array:
        """The product of the local extents of some factors, (K,)."""
        return np.asarray(self.extents[:, list(factors)].prod(axis=1))


def multiplied_in(software: Software, dtype: str) -> str:
    """The dtype in which a training stack multiplies operands of a dtype. A dtype of products alone applies only to
    operands that are rounded to it."""
    products = software.products
    rounded = DTYPES[products].operands if products else ""
    return dtype if not products or (rounded and rounded not in DTYPES[dtype].tensors) else products


def misaligned(call: KernelCall, dtype: str, *rows: Quantity) -> Array:
    """The factor by which a product is slower if rows of these lengths, in elements, are not multiples of 16 bytes;
    (K,) or a number.

    `Device.misaligned` is the factor for elements that are loaded one by one. Each doubling of the word size takes its
    root: on an H200 a row with an odd number of elements takes 5.7 times as long, one with an even number 2.6 times."""
    if dtype not in SHORT:
        return np.asarray(1.0)
    slower, size = np.asarray(1.0), WORD // element_bytes(dtype)
    while size > 1:  # elements of a word; the smallest word that fits no row decides
        lacking = np.logical_or.reduce([np.asarray(row) % size != 0 for row in rows])
        slower = np.where(lacking, call.device.misaligned ** (2 / size), slower)
        size //= 2
    return slower


def passed(call: KernelCall, nbytes: Array) -> Array:
    """Seconds of a kernel that reads and writes this many bytes in all."""
    nothing = np.zeros(len(nbytes))
    time = operator_time(
        op_class="elementwise", flops=nothing, bytes_moved=nbytes, dtype=call.dtype, device=call.device
    )
    return np.asarray(time)


def copied(call: KernelCall, nbytes: Quantity) -> Array:
    """Seconds of a copy that reads and writes this many bytes, as many times as the training stack does."""
    moved = np.asarray(nbytes) * call.software.passes
    time = operator_time(op_class="copy", flops=0.0, bytes_moved=moved, dtype=call.dtype, device=call.device)
    return np.asarray(time)


def attention_shape(call: KernelCall) -> AttentionShape:
    extents = {role: call.extent(factors) for role, factors in call.rule.roles}
    return AttentionShape(**extents, causal=call.rule.causal)


def scores_of(shape: AttentionShape) -> Array:
    return np.asarray(shape.batch * shape.heads * shape.queries * shape.keys)
