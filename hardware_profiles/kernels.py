"""Fitted facts about the two kinds of kernels that dominate a training step: matrix products and attention.

They are parameters of the formulas in `costmodels.kernels.matmul` and `costmodels.kernels.attention`, which explain
each one. There is one set per device and dtype. None for a dtype means: use the roofline with the efficiency of the op
class.
"""

from dataclasses import dataclass, field

from hardware_profiles.digests import OPTIONAL_IN_DIGEST
from hardware_profiles.units import BytesPerSecond, Flops, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulKernel:
    """How a device multiplies matrices of one dtype, and how far measured times are from that.

    Attributes:
        compute: share of the datasheet's peak that large kernels reach.
        bandwidth: share of the datasheet's memory bandwidth that large kernels reach.
        launch: seconds of a kernel that does almost nothing.
        feed: bytes/s at which all compute units together read operands from the cache.
        fill: elements of k that filling and draining the pipeline of a tile costs.
        quantisation: how far a last wave that is not full costs a full one (0: persistent kernels share it; 1: all of
            it).
        split: seconds to cut k and to add up the parts.
        convert: bytes/s, read and written, at which the first operand is converted to this dtype; None if it has it
            already.
        spread: standard deviation of log(measured / predicted) time.
        clock: share of the rates that is left in training, where power limits the clock and, on AMD's devices, products
            of backward passes are slower. All others are those of forward products, on NVIDIA's devices of single ones
            on a device that was idle before.
        added: share of the remaining rate that a product keeps if it adds its result to one in fp32, as weight
            gradients do.
    """

    compute: float
    bandwidth: float
    launch: Seconds
    feed: BytesPerSecond
    fill: float
    quantisation: float
    split: Seconds
    convert: BytesPerSecond | None
    spread: float
    clock: float = field(default=1.0, metadata=OPTIONAL_IN_DIGEST)
    added: float = field(default=1.0, metadata=OPTIONAL_IN_DIGEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernel:
    """How a device computes fused attention in one dtype, and how far measured times are from that.

    Attributes:
        compute: share of the peak with head_dim 128, long sequences and many heads.
        softmax: FLOP of the softmax per score, at the peak rate.
        fill: keys that starting a tile costs.
        tail: share of the longest tile by which compute units finish at different times.
        preparation: seconds that the measured call needs outside attention.
        passes: how often the measured call also reads and writes queries, keys and values (to rotate them and to store
            them in a cache).
        spread: as in `MatmulKernel`.
        backward: rate of the backward pass over that of the forward pass; None: FlashAttention-2's on A100.
    """

    compute: float
    softmax: Flops
    fill: float
    tail: float
    preparation: Seconds
    passes: float
    spread: float
    backward: float | None = field(default=None, metadata=OPTIONAL_IN_DIGEST)
