"""Fused attention with a bias for every score: ALiBi (Press et al. 2022, arXiv 2108.12409), passed as `attn_mask`.

A kernel that supports ALiBi computes it from one slope per head (flash_attn 2.4, `alibi_slopes`), at no cost. A call
with a mask reads it from memory. With E = batch heads q k scores of w bytes:

    forward     mask and slopes are added, E is written, and E is read                                         2 w E
    backward    E is read once more                                                                              w E
    kept        for the backward pass                                                                            w E
    work        that of attention without causality: the mask hides keys, and no kernel knows which

(PaddleNLP, transformers/llama/fusion_ops.py: `attention_mask.cast(alibi.dtype) + alibi`, then
scaled_dot_product_attention with `is_causal=attention_mask is None`; torch's takes either a mask or `is_causal`.)
"""

from dataclasses import replace

import numpy as np

from costmodels import AttentionShape, element_bytes
from planner.pricing.kernels.call import Array, KernelCall, attention_shape, passed, scores_of


def is_biased(call: KernelCall) -> bool:
    """Whether an operator is fused attention whose scores have a bias in memory, in this software."""
    fused = call.rule.op_class == "attention" and not call.rule.unfused and call.software.attention != "unfused"
    return fused and call.software.biased


def worked(shape: AttentionShape, call: KernelCall) -> AttentionShape:
    """The shape of the work that the kernel does."""
    return replace(shape, causal=False) if is_biased(call) else shape


def bias_seconds(shape: AttentionShape, call: KernelCall) -> tuple[Array, Array]:
    """Seconds for the bias, forward and backward, (K,) each."""
    if not is_biased(call):
        return np.zeros(len(call.extents)), np.zeros(len(call.extents))
    read = element_bytes(call.dtype) * scores_of(shape)
    return passed(call, 2 * read), passed(call, read)


def bias_bytes(call: KernelCall) -> Array:
    """Bytes of the bias that are kept for the backward pass, (K,)."""
    if not is_biased(call) or not call.graded:
        return np.zeros(len(call.extents))
    return element_bytes(call.dtype) * scores_of(attention_shape(call))
