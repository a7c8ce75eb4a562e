"""Seconds of recurrent layers, scans and indexers."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from costmodels import (
    DeltaRuleShape,
    IndexScoresShape,
    RecurrentShape,
    SelectiveScanShape,
    StateSpaceShape,
    element_bytes,
    index_scores_backward_time,
    index_scores_time,
    recurrent_backward_time,
    recurrent_time,
)
from hardware_profiles import Device, Software
from planner.graph.tracing.scans import CHUNK
from planner.pricing.kernels.call import Array, KernelCall

_DECAY = 3
"""Index of the decay among the operands of the gated delta rule."""


def recurrent_seconds(call: KernelCall) -> tuple[Array, Array]:
    dtype = call.multiplied
    shape = RecurrentShape(**{role: call.extent(factors) for role, factors in call.rule.roles})
    forward = np.asarray(recurrent_time(shape, dtype, call.device))
    if not call.graded:
        return forward, np.zeros(len(call.extents))
    return forward, np.asarray(recurrent_backward_time(shape, dtype, call.device))


def _delta_rule_shape(call: KernelCall) -> DeltaRuleShape:
    extents = {role: call.extent(factors) for role, factors in call.rule.roles}
    channels = len(call.rule.operands[_DECAY]) == len(call.rule.operands[0])
    composed, again = _lacks_kernels(call), call.software.counts_gradients
    return DeltaRuleShape(**extents, chunk=CHUNK, channels=channels, composed=composed, again=again)


def _state_space_shape(call: KernelCall) -> StateSpaceShape:
    extents = {role: call.extent(factors) for role, factors in call.rule.roles}
    composed, again = _lacks_kernels(call), call.software.counts_gradients
    return StateSpaceShape(**extents, chunk=call.rule.chunk, composed=composed, again=again)


def _selective_scan_shape(call: KernelCall) -> SelectiveScanShape:
    extents = {role: call.extent(factors) for role, factors in call.rule.roles}
    return SelectiveScanShape(**extents, composed=_lacks_kernels(call), again=call.software.counts_gradients)


def index_scores_seconds(call: KernelCall) -> tuple[Array, Array]:
    extents = {role: call.extent(factors) for role, factors in call.rule.roles}
    shape = IndexScoresShape(**extents, composed=_lacks_kernels(call))
    dtype = "fp32" if shape.composed else call.multiplied  # as `planner.graph` computes it
    ahead = np.asarray(index_scores_time(shape, dtype, call.device))
    if not call.graded:
        return ahead, np.zeros(len(call.extents))
    return ahead, np.asarray(index_scores_backward_time(shape, dtype, call.device))


def _lacks_kernels(call: KernelCall) -> bool:
    return lacks_kernels(call.device, call.software)


def lacks_kernels(device: Device, software: Software) -> bool:
    """Whether the device has no fused kernels of scans and indexers; those exist on GPUs only."""
    return software.composes_scans or (software.counts_gradients and device.device_type != "cuda")


SCANS: Mapping[str, Callable[[KernelCall], Any]] = {
    "delta_rule": _delta_rule_shape,
    "selective_scan": _selective_scan_shape,
    "state_space": _state_space_shape,
}
"""Shapes of scans that a framework composes of its operators."""


def scan_seconds(
    forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[[KernelCall], tuple[Array, Array]]:
    """A function for the seconds of a scan, from the functions for its forward and backward pass."""

    def seconds(call: KernelCall) -> tuple[Array, Array]:
        shape, dtype = SCANS[call.rule.op_class](call), call.multiplied
        if shape.composed and element_bytes(call.dtype) < element_bytes("fp32"):
            dtype = "fp32"  # as `planner.graph` computes it
        ahead = np.asarray(forward(shape, dtype, call.device))
        return ahead, np.asarray(backward(shape, dtype, call.device)) if call.graded else np.zeros(len(call.extents))

    return seconds
