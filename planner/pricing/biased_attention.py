"""Fused attention with a bias for every score: ALiBi (Press et al. 2022, arXiv 2108.12409) handed over as `attn_mask`.

A kernel that knows ALiBi makes it of one slope a head (flash_attn 2.4, `alibi_slopes`), at no cost. What is called with
a mask reads it: E = batch heads q k scores of w bytes,

    forward     the mask and the slopes are added, E written, and E read                                       2 w E
    backward    read once more                                                                                   w E
    kept        for the backward pass                                                                            w E
    work        that of attention which is not causal: the mask hides keys, and no kernel knows which

(PaddleNLP, transformers/llama/fusion_ops.py: `attention_mask.cast(alibi.dtype) + alibi`, then
scaled_dot_product_attention with `is_causal=attention_mask is None`; torch's takes either a mask or `is_causal`.)
"""

from dataclasses import replace

import numpy as np

from costmodels import AttentionShape, element_bytes
from planner.pricing.kernel_call import Array, KernelCall, attention_shape, passed, scores_of


def is_biased(call: KernelCall) -> bool:
    """Whether an operator is fused attention whose scores have a bias in memory, by its software."""
    fused = call.rule.op_class == "attention" and not call.rule.unfused and call.software.attention != "unfused"
    return fused and call.software.biased


def worked(shape: AttentionShape, call: KernelCall) -> AttentionShape:
    """What a kernel works on."""
    return replace(shape, causal=False) if is_biased(call) else shape


def bias_seconds(shape: AttentionShape, call: KernelCall) -> tuple[Array, Array]:
    """Seconds for the bias, forward and backward, (K,) each."""
    if not is_biased(call):
        return np.zeros(len(call.extents)), np.zeros(len(call.extents))
    read = element_bytes(call.dtype) * scores_of(shape)
    return passed(call, 2 * read), passed(call, read)


def bias_bytes(call: KernelCall) -> Array:
    """Bytes of it that are kept for the backward pass, (K,)."""
    if not is_biased(call) or not call.graded:
        return np.zeros(len(call.extents))
    return element_bytes(call.dtype) * scores_of(attention_shape(call))
