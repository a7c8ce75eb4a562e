"""Fitted facts about the two kinds of kernels that decide a training step: matrix products and attention.

They are parameters of the formulas in `costmodels.matmul` and `costmodels.attention`, where each is explained. One set
per device and dtype; a dtype without one has None, which means: the roofline with the efficiency of the op class.
"""

from dataclasses import dataclass, field

from hardware_profiles.digests import OPTIONAL_IN_DIGEST
from hardware_profiles.units import BytesPerSecond, Flops, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulKernel:
    """How a device multiplies matrices of one dtype, and how far measured times are from that.

    `compute` and `bandwidth` are shares of the datasheet's figures that large kernels reach, `launch` the time of a
    kernel that does next to nothing, `feed` the rate at which all compute units together take operands in from the
    cache, `fill` the steps along k that filling and draining the pipeline of a tile costs, `quantisation` how far a
    last wave that is not full costs a whole one (0: persistent kernels share it out; 1: all of it), `split` what
    cutting k and adding the parts up costs. `convert` is the rate, in bytes read and written, at which the first
    operand is brought into this dtype; None where it comes in it. `spread` is the standard deviation of the logarithm
    of measured over predicted time.

    Those are of single kernels on a device that has not been working. `clock` is the share of their rate that is left
    under the load of training, where power limits the clock; `added` the share of that which a product keeps that adds
    its result to one in fp32, as weight gradients do.
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

    `compute` is the share of the peak with head_dim 128, long sequences and many heads; `softmax` the work of the
    softmax per score, in floating point operations of the peak rate; `fill` the keys that starting a tile costs; `tail`
    the share of the longest tile by which compute units finish after one another. `preparation` and `passes` are what
    the measured call does beside: seconds, and how often it reads and writes queries, keys and values (to rotate them
    and to store them in a cache). `spread` is as in `MatmulKernel`.
    """

    compute: float
    softmax: Flops
    fill: float
    tail: float
    preparation: Seconds
    passes: float
    spread: float
