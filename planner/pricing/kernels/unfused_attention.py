"""Attention with its scores in memory: its kernels, their launches, and the bytes that it keeps.

    scores E = batch heads q k             forward                              backward
    products    q k^T, p v                 2 matmuls                            4 matmuls
    softmax     scaled and masked          read and write: 2 w E                3 w E: result, gradient in and out
                fused, causal              1.5 w E: the masked half is zero     2 w E
    scale and mask, if they are kernels of their own    4 w E                   4 w E
    dropout, if the software has it        read, write, mask: (2 w + 1) E       (2 w + 1) E
    ALiBi, if the software has it      slopes copied and added to: 2 w E   nothing
    heads put together again               read and write the result            the same for its gradient

(Korthikanti et al. 2022, section 4.1, count the same tensors: 5 a s^2 b bytes kept where w = 2.)

Megatron's fused softmax of causal attention reads only the half below the diagonal, and writes the whole result
(megatron/fused_kernels/scaled_upper_triang_masked_softmax.h).

ALiBi is an argument of the first product (`torch.baddbmm` with beta 1, in transformer.py of Megatron-DeepSpeed): the
slopes are copied to all places of the result, and read there by the product.

Heads whose rows are not multiples of 16 bytes (150 or 108 elements) are multiplied without tensor cores, at the rate of
fp32: BLOOM's 19 runs with such heads take a fifth longer than 78 runs with other heads.

Megatron's fused softmax handles the scores of several heads at once (`Software.softmax_heads`, 4). If the heads of a
device, over all samples of a micro-batch, are not a multiple of that, PyTorch's softmax computes in fp32, kernel by
kernel. (16 heads over 8 tensor-parallel devices, one sequence: each layer takes 0.8 ms longer than with two.)
"""

import numpy as np

from costmodels import AttentionShape, Quantity, element_bytes, matmul_time
from planner.pricing.kernels.call import Array, KernelCall, attention_shape, copied, misaligned, passed, scores_of

UNFUSED_KERNELS = 7
"""Operators that a framework launches for unfused attention: two products, scaling, mask, softmax, dropout, a copy."""

SOFTMAX_KERNELS = 4
"""Additional launches if the fused softmax does not support that number of heads, and PyTorch's runs in fp32: a cast,
scaling, mask, and a cast back (Megatron-LM megatron/model/fused_softmax.py, forward_torch_softmax)."""

_CAST_FORWARD, _CAST_BACKWARD = 33, 35
"""Bytes per 16-bit score that PyTorch's softmax in fp32 reads and writes in addition to the fused one. Forward: cast 2
+ 4, scaled 4 + 4, masked 4 + 1 + 4, softmax 4 + 4, cast 4 + 2, less 2 + 2; backward: cast 2 + 4, softmax 4 + 4 + 4,
mask 4 + 1 + 4, scaled 4 + 4, cast 4 + 2, less 2 + 2 + 2."""


def is_unfused(call: KernelCall) -> bool:
    return call.rule.op_class == "attention" and (call.rule.unfused or call.software.attention == "unfused")


def score_bytes(call: KernelCall) -> Array | None:
    """Bytes of scores kept for the backward pass, (K,), by attention that the software does not fuse. None for all
    other operators, and for attention that cannot be fused at all: its rule says what it keeps."""
    if not is_unfused(call) or call.rule.unfused or not call.graded:
        return None
    shape = attention_shape(call)
    kept = call.software.scores
    return np.asarray(scores_of(shape) * (kept * element_bytes(call.dtype) + max(0.0, kept - 1)))


def unfused_seconds(shape: AttentionShape, call: KernelCall) -> tuple[Array, Array]:
    """Seconds of attention with its scores in memory, forward and backward."""
    dtype, device, width = call.dtype, call.device, element_bytes(call.dtype)
    each, q, k, d, v = (shape.batch * shape.heads, shape.queries, shape.keys, shape.head_dim, shape.value_dim)
    scores, nothing = scores_of(shape), np.zeros(len(call.extents))
    slower = misaligned(call, dtype, d, v, k)  # each product has rows of two of these

    def products(*extents: tuple[Quantity, Quantity, Quantity]) -> Array:
        seconds = slower * sum((np.asarray(matmul_time(*one, each, dtype, device)) for one in extents), nothing)
        if not (slower > 1.0).any() or not device.multiplies("fp32"):
            return seconds
        plain = sum((np.asarray(matmul_time(*one, each, "fp32", device)) for one in extents), nothing)
        return np.where(slower > 1.0, np.maximum(seconds, plain), seconds)

    drops, wide = call.rule.unfused or call.software.scores > 1, in_fp32(call)
    dropped = passed(call, (2 * width + 1) * scores) if drops else nothing
    together = copied(call, 2 * width * each * q * v)  # a product writes heads separately, fused attention does not
    half = (1.0 - wide) * bool(call.rule.causal and not call.rule.unfused and call.software.softmax_heads > 1)
    read = 1.0 - 0.5 * half  # share of the scores read: the fused softmax skips masked ones
    forward = products((q, k, d), (q, v, k)) + passed(call, ((read + 1) * width + wide * _CAST_FORWARD) * scores)
    biases = passed(call, 2 * width * scores) if call.software.biased else nothing
    apart = passed(call, 4 * width * scores) if call.software.masks_apart else nothing
    forward = forward + biases + dropped + together + apart
    if not call.graded:
        return forward, nothing
    backward = products((q, d, k), (k, d, q), (q, k, v), (k, v, q))
    kept = (2 * read + 1) * width + wide * _CAST_BACKWARD
    return forward, backward + passed(call, kept * scores) + dropped + together + apart


def in_fp32(call: KernelCall) -> Array:
    """1.0 where the fused softmax does not support the number of heads on a device, (K,)."""
    if call.rule.unfused or call.software.softmax_heads <= 1:
        return np.zeros(len(call.extents))
    shape = attention_shape(call)
    return np.asarray(np.asarray(shape.batch * shape.heads) % call.software.softmax_heads > 0, dtype=np.float64)
