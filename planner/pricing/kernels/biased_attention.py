"""Fused attention that reads a value for every score from memory, passed as `attn_mask`.

ALiBi (Press et al. 2022, arXiv 2108.12409) is a bias for every score of every head.

A kernel that supports ALiBi computes it from one slope per head (flash_attn 2.4, `alibi_slopes`), at no cost. A call
with a mask reads it from memory. With E = batch heads q k scores of w bytes:

    forward     mask and slopes are added, E is written, and E is read                                         2 w E
    backward    E is read once more                                                                              w E
    kept        for the backward pass                                                                            w E
    work        that of attention without causality: the mask hides keys, and no kernel knows which

(PaddleNLP, transformers/llama/fusion_ops.py: `attention_mask.cast(alibi.dtype) + alibi`, then
scaled_dot_product_attention with `is_causal=attention_mask is None`; torch's takes either a mask or `is_causal`.)

A mask of padding is one for all heads and all layers: batch q k elements in the dtype of activations, causal masking
included (transformers, modeling_llama.py at 4.49: `_update_causal_mask`). It is made once a step. Kernels read it for
every head, w E in either pass, and keep no copy of their own. It hides no work from them either.
"""

from dataclasses import replace

import numpy as np

from costmodels import AttentionShape, element_bytes
from planner.pricing.kernels.call import Array, KernelCall, attention_shape, passed, scores_of


def is_biased(call: KernelCall) -> bool:
    """Whether an operator is fused attention whose scores have a bias in memory, in this software."""
    return _is_fused(call) and call.software.biased


def is_masked(call: KernelCall) -> bool:
    """Whether an operator is fused attention that reads one mask for all heads, in this software."""
    return _is_fused(call) and call.software.masked and not call.software.biased


def worked(shape: AttentionShape, call: KernelCall) -> AttentionShape:
    """The shape of the work that the kernel does."""
    return replace(shape, causal=False) if is_biased(call) or is_masked(call) else shape


def bias_seconds(shape: AttentionShape, call: KernelCall) -> tuple[Array, Array]:
    """Seconds for the bias or the mask, forward and backward, (K,) each."""
    if not is_biased(call) and not is_masked(call):
        return np.zeros(len(call.extents)), np.zeros(len(call.extents))
    read = element_bytes(call.dtype) * scores_of(shape)
    written = read if is_biased(call) else 0.0 * read
    return passed(call, written + read), passed(call, read)


def bias_bytes(call: KernelCall) -> Array:
    """Bytes of the bias that are kept for the backward pass, (K,)."""
    if not is_biased(call) or not call.graded:
        return np.zeros(len(call.extents))
    return element_bytes(call.dtype) * scores_of(attention_shape(call))


def _is_fused(call: KernelCall) -> bool:
    return call.rule.op_class == "attention" and not call.rule.unfused and call.software.attention != "unfused"
