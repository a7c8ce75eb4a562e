"""Seconds of a mixture of experts."""

from dataclasses import replace

import numpy as np

from costmodels import ExpertsShape, element_bytes, experts_backward_time, experts_time, matmul_time
from planner.pricing.kernels.call import SHORT, Array, KernelCall, passed
from planner.pricing.kernels.products import cast_in_blocks_seconds, cast_seconds
from planner.sharding.rules.experts import matrices_of

_APART_EACH = 1.5
"""Kernels per matrix for each of the two products of an expert in a pass (`costmodels.kernels.experts`): one for each
matrix, each with two casts."""


def experts_seconds(call: KernelCall) -> tuple[Array, Array]:
    """Seconds of a mixture of experts, forward and backward, (K,) each.

    Operands are tokens, their weights, the chosen experts, and the matrices of all experts. Of the tokens that can
    reach a device, its rows are as many as its share of all experts.
    """
    dtype = call.multiplied
    roles = {role: call.extent(factors) for role, factors in call.rule.roles}
    matrices = matrices_of(call.rule)
    computed = call.flops / (2 * len(matrices) * roles["width"] * roles["hidden"])
    sequence, fill = call.software.buffers_of_experts
    shape = ExpertsShape(
        tokens=computed / roles["choices"] * fill,
        choices=roles["choices"],
        experts=held_experts(call, roles["experts"]),
        width=roles["width"],
        hidden=roles["hidden"],
        each=call.software.grouped,
        added=call.software.adds_in_fp32(call.dtype),
        sorted_again=_exchanged(call, roles["experts"]) if call.software.grouped else 0.0,
        fused=call.software.fused_experts,
        besides=call.software.row_bytes,
        first=len(matrices) - 1,
        slower=call.software.grouped_slower if dtype in SHORT else 1.0,
    )
    forward = np.asarray(experts_time(shape, dtype, call.device))
    if not call.graded:
        backward = np.zeros(len(call.extents))
    else:
        rows, weights = not {0, 1}.isdisjoint(call.graded), not {*matrices}.isdisjoint(call.graded)
        backward = np.asarray(experts_backward_time(shape, dtype, call.device, rows=rows, weights=weights))
    if sequence:
        moved = _moved_by_products(call, shape, sequence)
        forward, backward = forward + moved[0], backward + moved[1]
    return _cast_experts(call, shape, (forward, backward)) if call.rule.casts else (forward, backward)


def _moved_by_products(call: KernelCall, shape: ExpertsShape, sequence: int) -> tuple[Array, Array]:
    """Seconds of the products by which tokens reach the buffers of their experts, and come back (Lepikhin et al. 2020,
    arXiv 2006.16668, algorithm 1; `dense_matmul` of MaxText, src/MaxText/layers/moe.py at 019f0175).

    Of each sequence of S tokens, all experts have E C rows in their buffers. A mask of S x E C, one-hot, brings tokens
    there, and one of the weights brings results back:

        forward     (E C, h, S) + (S, h, E C)               rows x columns x depth; both masks are written
        backward    (S, h, E C) + (E C, h, S) of the tokens and of the results, (S, E C, h) of the weights' mask, whose
                    gradient is written and read
    """
    fill, each = call.software.buffers_of_experts[1], np.ones(len(call.extents))
    one, slots, hidden = sequence * each, fill * sequence * shape.choices * each, shape.hidden * each
    groups = np.maximum(np.asarray(shape.tokens) / (fill * sequence), 1.0) * each
    there, back, of_mask = (
        np.asarray(matmul_time(rows, columns, depth, groups, call.dtype, call.device))
        for rows, columns, depth in ((slots, hidden, one), (one, hidden, slots), (one, slots, hidden))
    )
    masks = np.asarray(passed(call, 2 * element_bytes(call.dtype) * groups * sequence * slots))
    backward = there + back + of_mask + masks if {0, 1} & {*call.graded} else np.zeros(len(call.extents))
    return there + back + masks, backward


def _cast_experts(call: KernelCall, shape: ExpertsShape, wide: tuple[Array, Array]) -> tuple[Array, Array]:
    """Experts with fp8 products, from their seconds without fp8 (`wide`).

    The products run at another rate, of whose gain the recipe leaves a part (`_gained`), and the operands of each are
    cast. A device without fp8 products casts there and back, and multiplies as without fp8.
    """
    rows = np.asarray(shape.tokens * shape.choices * shape.imbalance)
    products = np.asarray(shape.experts * shape.hidden * shape.width)
    share, (of_results, _, of_weights) = call.software.casts, call.rule.computed
    matrices, first = matrices_of(call.rule), shape.first  # each with its rows and its matrix
    forward_casts = share * (rows * (first * shape.hidden + shape.width) + len(matrices) * products)
    backward_casts = rows * (shape.hidden + first * shape.width) + share * len(matrices) * products
    columns = share * rows * len(matrices) * (shape.hidden + shape.width) * bool(of_weights)
    if not call.device.multiplies(of_results):
        there_and_back = 3 * element_bytes(call.dtype) + 2 * element_bytes(of_results)
        more = [np.asarray(passed(call, there_and_back * cast)) for cast in (forward_casts, backward_casts + columns)]
        return wide[0] + more[0], wide[1] + (more[1] if call.graded else 0.0)
    each = _APART_EACH * len(matrices) * call.device.launch_latency if expert_by_expert(call) else shape.each
    bare = replace(shape, converted=False, each=each, slower=1.0)
    cast = cast_in_blocks_seconds if call.rule.scaled_in_blocks else cast_seconds
    narrow = np.asarray(experts_time(bare, of_results, call.device)) + cast(call, of_results, forward_casts)
    forward = _gained(call, wide[0], narrow)
    if not call.graded:
        return forward, wide[1]
    wanted = not {0, 1}.isdisjoint(call.graded), not {*matrices}.isdisjoint(call.graded)

    def seconds(dtype: str, *, rows: bool, weights: bool) -> Array:
        return np.asarray(experts_backward_time(bare, dtype, call.device, rows=rows, weights=weights))

    narrow = seconds(of_results, rows=wanted[0], weights=wanted[1] and bool(of_weights))
    if wanted[1] and not of_weights:
        narrow = narrow + seconds(call.dtype, rows=False, weights=True) - seconds(call.dtype, rows=False, weights=False)
    casting = cast(call, of_results, backward_casts) + cast_seconds(call, of_results, columns)
    return forward, _gained(call, wide[1], narrow + casting)


def expert_by_expert(call: KernelCall) -> bool:
    """Whether the products of each expert are launched by themselves, as they are in fp8."""
    apart = call.software.expert_by_expert and call.rule.op_class == "experts" and call.rule.casts
    return bool(apart) and call.device.multiplies(call.rule.computed[0])


def _gained(call: KernelCall, wide: Array, narrow: Array) -> Array:
    """Seconds with fp8 products after the part of their gain that the recipe leaves."""
    gained = call.rule.gained
    return np.asarray(narrow if gained == 1.0 else gained * narrow + (1 - gained) * np.maximum(narrow, wide))


def _exchanged(call: KernelCall, most: Array) -> Array:
    """1.0 where a device has only some of the experts, else 0.0, (K,)."""
    if "e" not in call.rule.index:
        return np.zeros_like(most)
    return np.asarray(most < call.rule.factors[call.rule.index["e"]].extent, dtype=np.float64)


def held_experts(call: KernelCall, most: Array) -> Array:
    """Experts whose weights a device has, (K,). `most` is the extent on the device with the most work."""
    if "e" not in call.rule.index:
        return most
    factor = call.rule.factors[call.rule.index["e"]]
    return np.where(most < factor.extent, most / factor.imbalance, most)
