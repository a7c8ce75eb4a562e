"""Seconds of attention.

With a mask, a fused kernel is assumed to be as fast as without one. It reads the mask once forward and once backward; a
gradient of the mask is written as large as the scores and summed up. For devices whose fused kernels take no mask
(FlashAttention-2) this is too little: choose "unfused" for their software. A mask that hides half of the scores saves
no work, because its content is unknown; attention that is marked as causal does half.
"""

from dataclasses import replace

import numpy as np

from costmodels import AttentionShape, attention_backward_time, attention_time, element_bytes
from planner.pricing.kernels.biased_attention import bias_seconds, worked
from planner.pricing.kernels.call import Array, KernelCall, attention_shape, passed, scores_of
from planner.pricing.kernels.ordered_attention import ordered_seconds
from planner.pricing.kernels.products import factors_of
from planner.pricing.kernels.unfused_attention import is_unfused, unfused_seconds

_NARROW, _WIDE = 64, 128
"""Head sizes, in elements, that `Device.generations` distinguishes."""

_FURTHER = 3
"""Index of the first operand of attention after queries, keys and values. A mask has a dim of keys; sinks and document
numbers have none."""


def attention_seconds(call: KernelCall) -> tuple[Array, Array]:
    shape = attention_shape(call)
    read, read_backward = _mask(shape, call)
    if is_unfused(call):
        forward, backward = unfused_seconds(shape, call)
        return forward + read, backward + read_backward
    made, reread = bias_seconds(shape, call)
    shape, read, read_backward = worked(shape, call), read + made, read_backward + reread
    slower = call.uneven * _older(call, shape)
    if call.software.has_sinks:
        slower = slower * call.software.sinks
    shape = _seen(shape, call)
    joined, added = _joined(shape, call)
    if call.software.repeats_keys:
        copied, summed = _repeated(shape, call)
        read, read_backward = read + copied, read_backward + summed
    drops = call.rule.drops or call.software.drops_probabilities
    drawn, drawn_again = (drops and call.device.dropout_slowdown(call.software.attention)) or (1.0, 1.0)
    forward = np.asarray(attention_time(shape, call.dtype, call.device)) * slower * drawn + joined + read
    if not call.graded:
        return forward, np.zeros(len(call.extents))
    work = call.rule.backward_work(call.graded)
    backward = np.asarray(attention_backward_time(shape, call.dtype, call.device, work)) * slower * drawn_again
    return forward, ordered_seconds(backward, shape, call) + added + read_backward


def _older(call: KernelCall, shape: AttentionShape) -> Array:
    """How many times longer the software's kernels take than the best ones, (K,).

    Measured with heads of 64 and of 128 elements, linear in between.
    """
    wide, narrow = (call.device.attention_slowdown(call.software.attention, narrow=one) for one in (False, True))
    share = np.clip((np.asarray(shape.head_dim, dtype=np.float64) - _NARROW) / (_WIDE - _NARROW), 0.0, 1.0)
    return np.asarray(narrow + (wide - narrow) * share)


def _joined(shape: AttentionShape, call: KernelCall) -> tuple[Array, Array]:
    """Extra seconds of ring attention for every hop but the first, forward and backward, (K,) each.

    Forward: launches, and the passes that join a hop's result to the others. Backward: launches, and the passes that
    add up gradients.
    """
    width, wide = element_bytes(call.dtype), max(4, element_bytes(call.dtype))
    queries = shape.batch * shape.heads * shape.queries
    keys = shape.batch * shape.key_heads * shape.keys / call.hops * (shape.head_dim + shape.value_dim)
    further = call.hops - 1
    launched = call.device.launch_latency * further
    joined = further * passed(call, np.asarray((2 * wide + width) * queries * shape.value_dim)) + launched
    gradients = np.asarray((2 * wide + width) * (queries * shape.head_dim + keys))
    return joined, further * passed(call, gradients) + 3 * launched


def _repeated(shape: AttentionShape, call: KernelCall) -> tuple[Array, Array]:
    """Seconds of copying keys and values for every query head, forward, and of summing their gradients, backward.

    0 where each query head has its own keys and values.
    """
    width = element_bytes(call.dtype)
    tokens = shape.batch * shape.keys * (shape.head_dim + shape.value_dim)
    copied = passed(call, np.asarray(width * tokens * (shape.heads + shape.key_heads), dtype=np.float64))
    shared = np.where(np.asarray(shape.heads) > shape.key_heads, copied, 0.0)
    return shared, shared


def _seen(shape: AttentionShape, call: KernelCall) -> AttentionShape:
    """The shape with what a window leaves: that of the rule, or else the one that the software has in every layer."""
    rule, width = call.rule, call.software.window
    seen = min(1.0, rule.seen)
    if rule.window is not None:
        return replace(shape, seen=seen, reach=rule.window.reach(rule.whole_extent(dict(rule.roles)["keys"])))
    return replace(shape, seen=seen * _windowed(shape, width), reach=width) if width > 0 else replace(shape, seen=seen)


def _windowed(shape: AttentionShape, window: int) -> Array:
    """Share of the work of attention that a window of w keys leaves, (K,).

    Causal attention over k keys: query i of k sees min(w, i) keys, which is 2 w/k - (w/k)^2 of all. Otherwise w/k.
    """
    seen = np.minimum(1.0, window / np.asarray(shape.keys, dtype=np.float64))
    return np.asarray(2 * seen - seen * seen if shape.causal else seen)


def _mask(shape: AttentionShape, call: KernelCall) -> tuple[Array, Array]:
    """Seconds for the mask, forward and backward, (K,) each; 0 without a mask."""
    nothing = np.zeros(len(call.extents))
    keys, operands = set(dict(call.rule.roles)["keys"]), enumerate(call.rule.operands)
    masks = [(at, factors_of(dims)) for at, dims in operands if at >= _FURTHER and keys & factors_of(dims)]
    if not masks:
        return nothing, nothing
    ((at, factors),) = masks
    width = element_bytes(call.dtype)
    mask = call.extent(factors) * width
    forward = passed(call, mask)
    if not call.graded:
        return forward, nothing
    return forward, passed(call, mask + 2 * width * scores_of(shape)) if at in call.graded else forward
