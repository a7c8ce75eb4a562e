"""Seconds of an operator's kernels on local shapes, forward and backward, by the class of the operator.

Matrix products (`products`), attention (`attention`), experts (`experts`) and scans (`scans`) are priced by shape,
everything else by the roofline of its class.

Effects of the software (`hardware_profiles.Software`):

    every operator        t >= host latency: kernels that are shorter wait for the host, unless it is ahead of them
    elementwise and such  bytes times `passes`; norms that no kernel computes at once: see `composed_norms.py`;
                          rotations operator by operator, or with `fuses_chains` one that reads and writes, and
                          activations of gates within the product after them
    attention             "flash1", "flash2": the time of older kernels; "unfused" (and any that drops probabilities in
                          `runtime.ops.attention.with_dropout`): scores through memory, see `unfused_attention.py`;
                          with dropout inside a fused kernel longer by `Device.dropout_slowdown`, and by
                          `ordered_attention.py` if gradients are added up in a fixed order
    residual sums         with dropout of a branch: see `dropped_branches.py`
"""

from collections.abc import Callable, Mapping

import numpy as np

from costmodels import (
    delta_rule_backward_time,
    delta_rule_time,
    operator_time,
    selective_scan_backward_time,
    selective_scan_time,
    state_space_backward_time,
    state_space_time,
)
from planner.pricing.kernels import composed_losses
from planner.pricing.kernels.attention import attention_seconds
from planner.pricing.kernels.call import Array, KernelCall
from planner.pricing.kernels.composed_gelu import composed_gelu_seconds, is_composed_gelu
from planner.pricing.kernels.composed_norms import composed_seconds, is_composed
from planner.pricing.kernels.dropped_branches import dropped_launches, dropped_moved
from planner.pricing.kernels.experts import experts_seconds
from planner.pricing.kernels.launches import joins_another
from planner.pricing.kernels.products import matmul_seconds
from planner.pricing.kernels.scans import index_scores_seconds, recurrent_seconds, scan_seconds

_PASSED = frozenset({"elementwise", "normalisation", "cross_entropy", "copy"})


def kernel_seconds(call: KernelCall) -> tuple[Array, Array]:
    """Seconds of the forward and the backward kernels, (K,) each; 0 backward without gradients.

    A dim of 0 elements makes no work, whatever the other extents; results, if there are any, are filled with zeros.
    """
    empty = any(not factor.extent for factor in call.rule.factors)
    return _by_work(call) if empty else _BY_SHAPE.get(call.rule.op_class, _by_work)(call)


def _by_work(call: KernelCall) -> tuple[Array, Array]:
    if is_composed(call):
        return composed_seconds(call)
    if is_composed_gelu(call):
        return composed_gelu_seconds(call)
    if joins_another(call):
        return np.zeros(len(call.extents)), np.zeros(len(call.extents))
    if call.rule.composed and not call.software.fuses_chains:
        return _one_by_one(call)
    passes = call.software.passes if call.rule.op_class in _PASSED else 1.0

    def seconds(work: Array, moved: Array, kernels: int) -> Array:
        time = operator_time(
            op_class=call.rule.op_class,
            flops=work,
            bytes_moved=moved * passes,
            dtype=call.dtype,
            device=call.device,
            kernels=kernels,
        )
        return np.asarray(time, dtype=np.float64)

    composed = composed_losses.is_composed_loss(call)
    dropped, read_again = dropped_moved(call)
    own = dropped_launches(call)
    forward = seconds(call.flops, call.moved + dropped, 1 + own)
    forward = composed_losses.composed_loss_seconds(call) if composed else forward
    if not call.graded:
        return forward, np.zeros(len(call.extents))
    backward = composed_losses.composed_loss_backward(call) if composed else None
    if backward is not None:
        return forward, backward
    work = call.flops * call.rule.backward_work(call.graded)
    return forward, seconds(work, call.moved_backward + read_again, max(1, call.worked) + own)


def _one_by_one(call: KernelCall) -> tuple[Array, Array]:
    """An operator that runs as several PyTorch operators, each of which passes over memory."""
    forward, backward = np.zeros(len(call.extents)), np.zeros(len(call.extents))
    for one in call.rule.composed:
        ahead, back = (
            operator_time(
                op_class=one.op_class,
                flops=np.zeros(len(call.extents)),
                bytes_moved=call.software.passes * sum(term.coefficient * call.extent(term.factors) for term in terms),
                dtype=call.dtype,
                device=call.device,
                kernels=kernels,
            )
            for terms, kernels in zip((one.moved, one.moved_backward), one.operators, strict=True)
        )
        forward, backward = forward + ahead, backward + back
    return forward, backward if call.graded else np.zeros(len(call.extents))


_BY_SHAPE: Mapping[str, Callable[[KernelCall], tuple[Array, Array]]] = {
    "attention": attention_seconds,
    "delta_rule": scan_seconds(delta_rule_time, delta_rule_backward_time),
    "experts": experts_seconds,
    "index_scores": index_scores_seconds,
    "matmul": matmul_seconds,
    "recurrent": recurrent_seconds,
    "selective_scan": scan_seconds(selective_scan_time, selective_scan_backward_time),
    "state_space": scan_seconds(state_space_time, state_space_backward_time),
}
