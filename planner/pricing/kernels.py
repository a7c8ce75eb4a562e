"""Seconds of an operator's kernels on local shapes, forward and backward, by the class of the operator.

Matrix products and attention are priced by shape, everything else by the roofline of its class. A rule is enough to
find the shape of a product C = A B, on the extents that a strategy leaves on a device:

    batch   factors of A, B and C             linear   b s i, o i -> b s o       m = b s,  n = o,  k = i
    k       of A and B, not of C              bmm      e m k, e k n -> e m n     batch = e
    m       of A, not of B
    n       of B, not of A

A convolution is priced as its implicit GEMM. The roles of its rule name the extents: rows m = n h w and columns n = o
of the result, k = i and the kernel, batch = groups. Elements that overlapping windows share are read from memory once,
so its bytes are those of its tensors. Depthwise convolutions have no columns (`depthwise.py`). No kernel adds the
gradient of its weight to one in fp32: Megatron's hook does (`DistributedDataParallel._make_backward_post_hook`).

The gradients are products too, dA = dC B^T of shape (m, k, n) and dB of shape (n, k, m), one kernel each. A third
operand (a bias) is added by the kernel that writes C, at no cost. Its gradient is a sum over dC. That is free if it is
the epilogue of another product, else see `Software.sums_biases`. In 16 bits, rows of n or k elements that are no
multiples of 16 bytes cannot be loaded in whole words: such products take `Device.misaligned` times longer.

Effects of the software (`hardware_profiles.Software`):

    every operator        t >= host latency: kernels that are shorter wait for the host, unless it is ahead of them
    elementwise and such  bytes times `passes`; norms that no kernel computes at once: see `composed_norms.py`;
                          rotations operator by operator, or with `fuses_chains` one that reads and writes, and
                          activations of gates within the product after them
    attention             "flash1", "flash2": the time of older kernels; "unfused" (and any that drops probabilities,
                          see `runtime.ops.attention`): scores through memory, see `unfused_attention.py`;
                          with dropout inside a fused kernel longer by `attention_dropout`, and by
                          `ordered_attention.py` if gradients are added up in a fixed order
    residual sums         with dropout of a branch: see `dropped_branches.py`

With a mask, a fused kernel is assumed to be as fast as without one. It reads the mask once forward and once backward; a
gradient of the mask is written as large as the scores and summed up. For devices whose fused kernels take no mask
(FlashAttention-2) this is too little: choose "unfused" for their software. A mask that hides half of the scores saves
no work, because its content is unknown; attention that is marked as causal does half.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from costmodels import (
    FREE_OP_CLASS,
    AttentionShape,
    DeltaRuleShape,
    ExpertsShape,
    IndexScoresShape,
    RecurrentShape,
    SelectiveScanShape,
    StateSpaceShape,
    attention_backward_time,
    attention_time,
    delta_rule_backward_time,
    delta_rule_time,
    element_bytes,
    experts_backward_time,
    experts_time,
    index_scores_backward_time,
    index_scores_time,
    matmul_time,
    operator_time,
    recurrent_backward_time,
    recurrent_time,
    selective_scan_backward_time,
    selective_scan_time,
    state_space_backward_time,
    state_space_time,
    weight_gradient_time,
)
from hardware_profiles import Device, Software
from planner.graph.scans import CHUNK
from planner.pricing import composed_losses
from planner.pricing.biased_attention import bias_seconds, worked
from planner.pricing.composed_norms import KERNELS, composed_seconds, is_composed
from planner.pricing.depthwise import at_most_passed
from planner.pricing.dropped_branches import dropped_launches, dropped_moved
from planner.pricing.kernel_call import Array, KernelCall, attention_shape, misaligned, passed, scores_of
from planner.pricing.ordered_attention import ordered_seconds
from planner.pricing.unfused_attention import SOFTMAX_KERNELS, UNFUSED_KERNELS, in_fp32, is_unfused, unfused_seconds
from planner.sharding.rules.experts import matrices_of

EXPERTS_KERNELS = 12
"""Operators that a framework launches for experts: count the rows, sort them and their weights; move them to their
experts; two products, the activation; move back, weight and sum."""

DROPLESS_KERNELS = 50
"""Operators that Megatron launches for experts; it sorts once more after the exchange and splits tensors expert by
expert. Counted in megatron/core/transformer/moe at d98e8a64dd, forward, all-to-all dispatcher: router 12, its auxiliary
loss 14, counts of rows and their copies to the host 12, gathering of rows 7, exchanges 3, sorting there and back 3,
products and activation 5, putting back 3. That makes 59, and 45 without the loss; kernels that Transformer Engine fuses
are 10 fewer. 14 runs that wait for the host lie in between (docs/validate-findings.md); this number gives them the
smallest error."""

ROUTER_KERNELS = 12
"""Those of the operators of experts that CUDA graphs may hold: the router, and the counting and sorting of rows before
their exchange."""

FUSED_ROUTER_KERNELS = 15
"""Operators that Transformer Engine's router saves: 7 of 8 for the softmax, the largest values, the two maps that they
are scattered to and their casts; 5 of 6 for those of the auxiliary loss; 3 of 4 for the loss itself
(megatron/core/transformer/moe/moe_utils.py at d98e8a64dd: topk_routing_with_score_function,
compute_routing_scores_for_aux_loss, switch_load_balancing_loss_func)."""

APART_KERNELS = 6
"""Operators that a framework launches in each pass for each matrix of each expert, if its fp8 products are launched one
by one: half of three products, each with the casts of both operands, and a copy of its result."""

APART_IN_BLOCKS = 14
"""As `APART_KERNELS`, with scales of blocks of 128: two of the three products make scales of their own and move them to
where cuBLAS reads them, 12 operators each (clamp, division, cast, padding and copy of both operands, the product, its
copy)."""

_APART_EACH = 1.5
"""Kernels per matrix for each of the two products of an expert in a pass (`costmodels.experts`): one for each matrix,
each with two casts."""

CAST_KERNELS = 5
"""Operators that a framework launches for a product whose operands it casts: the largest element of each, the cast of
each, the product."""

_DECAY = 3
"""Index of the decay among the operands of the gated delta rule."""

_NARROW, _WIDE = 64, 128
"""Head sizes, in elements, that `Device.generations` distinguishes."""

_FP32 = 4  # bytes

_FURTHER = 3
"""Index of the first operand of attention after queries, keys and values. A mask has a dim of keys; sinks and document
numbers have none."""

_PASSED = frozenset({"elementwise", "normalisation", "cross_entropy", "copy"})


def kernel_seconds(call: KernelCall) -> tuple[Array, Array]:
    """Seconds of the forward and the backward kernels, (K,) each; 0 backward without gradients.

    A dim of 0 elements makes no work, whatever the other extents; results, if there are any, are filled with zeros.
    """
    empty = any(not factor.extent for factor in call.rule.factors)
    return _by_work(call) if empty else _BY_SHAPE.get(call.rule.op_class, _by_work)(call)


def host_seconds(call: KernelCall) -> tuple[Array, Array]:
    """Seconds that the host takes to launch the operator, forward and backward, (K,) each."""
    more = SOFTMAX_KERNELS * in_fp32(call) if is_unfused(call) else np.zeros(len(call.extents))
    if _expert_by_expert(call):
        blocks = call.rule.scaled_in_blocks and call.rule.computed[0] == "fp8"
        apart = (APART_IN_BLOCKS if blocks else APART_KERNELS) * len(matrices_of(call.rule))
        more = more + apart * _held_experts(call, call.extent(dict(call.rule.roles)["experts"]))
    each, launched = call.device.host_latency * call.software.host, _launched(call)
    back = launched + _launched_besides(call) if launched else 0
    if launched:
        own = dropped_launches(call)
        launched, back = launched + own, back + own
    if call.rule.op_class in _SCANS:
        within = _SCANS[call.rule.op_class](call).launched  # PyTorch launches these itself, without other software
        ahead, behind = (call.device.host_latency * count for count in within)
        return np.asarray(each * launched + ahead), np.asarray(each * back + behind)
    return np.asarray(each * (launched + more)), np.asarray(each * (back + more))


def _launched(call: KernelCall) -> int:
    """Operators that a framework launches forward for one operator of the graph."""
    experts, graphs = call.rule.op_class == "experts", call.software.graphs
    if call.rule.op_class == FREE_OP_CLASS or graphs == "step" or (graphs == "attention" and not experts):
        return 0
    if _joins_product(call):
        return 0
    if call.rule.casts and not experts:
        return CAST_KERNELS
    if experts:
        if not call.software.counts_rows:
            return EXPERTS_KERNELS
        if graphs == "none":
            return DROPLESS_KERNELS - (FUSED_ROUTER_KERNELS if call.software.routes_fused else 0)
        return DROPLESS_KERNELS - ROUTER_KERNELS
    if is_composed(call):
        return KERNELS
    if composed_losses.is_composed_loss(call):
        return composed_losses.KERNELS
    if call.rule.composed and not call.software.fuses_chains:
        return sum(one.operators[0] for one in call.rule.composed)
    return UNFUSED_KERNELS if is_unfused(call) else 1


def _launched_besides(call: KernelCall) -> int:
    """Operators that autograd launches in the backward pass beyond as many as forward, if the software counts them.

    A product needs one for the gradient of each further operand, and a sum for that of a bias; an elementwise operator
    one for each further factor. The gradients of a sum are that of its result and need none. But if the sum adds a
    value that something else reads too, as in a residual connection, the sum of their gradients needs one.
    """
    rule, worked = call.rule, max(1, call.worked)
    if not call.software.counts_gradients:
        return 0
    if rule.op_class == "matmul":
        biases = call.software.sums_biases and any(addend in call.graded for addend in rule.addends)
        return (worked - 1) * (CAST_KERNELS if rule.casts else 1) + biases
    return worked - 1 if rule.op_class == "elementwise" and not rule.passes else 0


def _by_work(call: KernelCall) -> tuple[Array, Array]:
    if is_composed(call):
        return composed_seconds(call)
    if _joins_product(call):
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


def _joins_product(call: KernelCall) -> bool:
    """Whether the operator is an activation that the kernel of the product after it computes.

    That kernel reads the activation's operands, and writes their gradients with its own.
    """
    return call.software.fuses_chains and call.rule.joins_product


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


def _matmul(call: KernelCall) -> tuple[Array, Array]:
    gained, narrow = call.software.gained, _products(call)
    if gained == 1.0 or not call.software.products:
        return narrow
    wide = _products(replace(call, software=replace(call.software, products="")))
    forward, backward = (gained * one + (1 - gained) * other for one, other in zip(narrow, wide, strict=True))
    return forward, backward


def _products(call: KernelCall) -> tuple[Array, Array]:
    """A product and its two gradients, all in one dtype."""
    rule = call.rule
    if rule.casts:
        return _cast_matmul(call)
    first, second = (operand for operand in range(len(rule.operands)) if operand not in rule.addends)
    m, n, k, batch = _product_shape(call, first, second)
    dtype = call.multiplied
    slower = misaligned(call, dtype, n, k)
    products = [(m, n, k)]
    products += [(m, k, n)] if first in call.graded else []
    rows, columns, depths = (np.concatenate(extents) for extents in zip(*products, strict=True))
    moved = np.tile(call.moved, len(products)) if rule.roles else None
    scaled = dtype == "fp8" and call.software.current_scaling
    own = np.concatenate(_own_shares(call, first, second)[: len(products)]) if scaled else np.ones(len(rows))
    cast = own if scaled else np.repeat([call.software.casts, 1.0][: len(products)], len(m))
    several = np.tile(batch, len(products))
    time = np.asarray(matmul_time(rows, columns, depths, several, dtype, call.device, moved, converted=cast))
    if scaled:  # the largest element of each first operand is found before
        time = time + passed(call, element_bytes(call.dtype) * own * rows * depths * several)
    by_product = time.reshape(len(products), len(m)) * slower
    backward = by_product[1:].sum(axis=0)
    wide = call.software.adds_in_fp32(call.dtype)
    if second in call.graded:
        added = wide and not rule.roles and bool((batch == 1).all())  # products of activations are not
        moved = call.moved if rule.roles else None
        weights = weight_gradient_time(n, k, m, batch, dtype, call.device, moved, added=added)
        backward = backward + np.asarray(weights) * slower
        if dtype == "fp8" and not call.software.keeps_fp8:
            backward = backward + _cast(call, dtype, batch * (n + k) * m, scaled=True)
    forward, backward = at_most_passed(call, by_product[0], backward)
    if wide and rule.roles and second in call.graded:
        backward = backward + passed(call, (element_bytes(call.dtype) + 2 * _FP32) * batch * n * k)
    if call.software.sums_biases and any(addend in call.graded for addend in rule.addends):
        backward = backward + passed(call, element_bytes(call.dtype) * batch * m * n)
    return forward, backward


def _cast_matmul(call: KernelCall) -> tuple[Array, Array]:
    """A linear layer whose products have operands that are cast for each product, or none (`Rule.computed`)."""
    m, n, k, batch = _product_shape(call, 0, 1)
    result, inputs, weights = call.rule.computed
    share, weight = call.software.casts, 0.0 if call.rule.narrow else 1.0
    forward = _cast_product(call, result, (m, n, k, batch), share * batch * (m + weight * n) * k)
    backward = np.zeros(len(m))
    if 0 in call.graded:
        backward = backward + _cast_product(call, inputs, (m, k, n, batch), batch * (m * n + share * weight * n * k))
    if 1 in call.graded and weights:
        columns = share * batch * (n + k) * m
        backward = backward + _cast_product(call, weights, (n, k, m, batch), columns, in_columns=True)
    elif 1 in call.graded:
        added = call.software.adds_in_fp32(call.dtype)
        backward = backward + np.asarray(weight_gradient_time(n, k, m, batch, call.dtype, call.device, added=added))
    return forward, backward


def _cast_product(
    call: KernelCall,
    dtype: str,
    extents: tuple[Array, Array, Array, Array],
    cast: Array,
    *,
    in_columns: bool = False,
) -> Array:
    """Seconds of products C (m x n) = A B, and of casting `cast` elements for them.

    `in_columns`: scales are those of columns in every recipe except those of tensors and of blocks of 32. A device
    without products of the dtype computes in the dtype of the tensors, on operands that are cast there and back.
    """
    m, n, k, batch = extents
    device, width = call.device, element_bytes(call.dtype)
    if not device.multiplies(dtype):
        there_and_back = 3 * width + 2 * element_bytes(dtype)  # find the largest: r; cast: r, w; back: r, w
        product = np.asarray(matmul_time(m, n, k, batch, call.dtype, device))
        return product + passed(call, there_and_back * cast)
    blocks = call.rule.scaled_in_blocks and (dtype == "mxfp8" or not in_columns)
    casting = _cast_in_blocks(call, dtype, cast) if blocks else _cast(call, dtype, cast)
    time = np.asarray(matmul_time(m, n, k, batch, dtype, device, converted=0.0)) + casting
    gained = call.rule.gained
    if gained == 1.0:
        return time
    wide = np.asarray(matmul_time(m, n, k, batch, call.dtype, device))
    return np.asarray(gained * time + (1 - gained) * np.maximum(time, wide))


def _cast(call: KernelCall, dtype: str, elements: Array, *, scaled: bool = False) -> Array:
    """Seconds of casting `elements` elements.

    They are read for the largest element, unless they are `scaled` by a value that another product has found, then read
    and written. Both operands of a weight gradient are cast: torchao keeps the original values and casts them once
    more, along the other dim (float8_linear.py: matmul_with_hp_or_float8_args).
    """
    reads = 1 if scaled else 2
    moved = (reads * element_bytes(call.dtype) + element_bytes(dtype)) * elements
    kernel = call.device.matmul_kernel(dtype) if call.device.multiplies(dtype) else None
    return passed(call, moved) if kernel is None or kernel.convert is None else np.asarray(moved / kernel.convert)


def _cast_in_blocks(call: KernelCall, dtype: str, elements: Array) -> Array:
    """Seconds of casting `elements` elements with a scale for each block.

    The largest of 128 is found in registers, so they are read once. Kernels of torchao process 4,096 columns of bf16 at
    2.63 to 2.90 TB/s on H100 (benchmarks/prototype/blockwise_fp8_training/README.md at 55c56d08); elementwise kernels
    reach 2.58 in its profile. Software that `looks_first` reads the elements twice.
    """
    reads = 2 if call.software.looks_first else 1
    return passed(call, (reads * element_bytes(call.dtype) + element_bytes(dtype)) * elements)


def _own_shares(call: KernelCall, first: int, second: int) -> tuple[Array, Array]:
    """Share of the first operand, and of the gradient of the result, that a device casts, (K,) each.

    If a dim that an operand lacks is sharded, each device has the whole operand. With sequence parallelism each device
    had a part of it before, and Transformer Engine casts that part before the gather
    (pytorch/module/layernorm_linear.py).
    """
    rule = call.rule
    if not call.software.regathers:
        return np.ones(len(call.extents)), np.ones(len(call.extents))
    if rule.roles:
        roles = dict(rule.roles)
        columns, depth = frozenset(roles["columns"]), frozenset(roles["depth"])
    else:
        a, b, c = (_factors(dims) for dims in (rule.operands[first], rule.operands[second], rule.results[0]))
        columns, depth = b - a, (a & b) - c

    def share(factors: frozenset[int]) -> Array:
        return call.extent(factors) / math.prod(rule.factors[factor].extent for factor in factors)

    return share(columns), share(depth)


def _factors(dims: Sequence[Sequence[int]]) -> frozenset[int]:
    return frozenset(factor for dim in dims for factor in dim)


def _product_shape(call: KernelCall, first: int, second: int) -> tuple[Array, Array, Array, Array]:
    """Extents m, n, k and batch of the forward product, (K,) each: from the roles of the rule, or from its operands."""
    rule = call.rule
    if rule.roles:
        extents = {role: call.extent(factors) for role, factors in rule.roles}
        return extents["rows"], extents["columns"], extents["depth"], extents["batch"]
    a, b, c = (_factors(dims) for dims in (rule.operands[first], rule.operands[second], rule.results[0]))
    return call.extent(a - b), call.extent(b - a), call.extent((a & b) - c), call.extent(a & b & c)


def _attention(call: KernelCall) -> tuple[Array, Array]:
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
    slower = slower * call.rule.seen
    if call.software.window > 0 and call.rule.window is None:
        slower = slower * _windowed(shape, call.software.window)
    joined, added = _joined(shape, call)
    if call.software.repeats_keys:
        copied, summed = _repeated(shape, call)
        read, read_backward = read + copied, read_backward + summed
    drawn, drawn_again = call.software.attention_dropout
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
    masks = [(at, _factors(dims)) for at, dims in operands if at >= _FURTHER and keys & _factors(dims)]
    if not masks:
        return nothing, nothing
    ((at, factors),) = masks
    width = element_bytes(call.dtype)
    mask = call.extent(factors) * width
    forward = passed(call, mask)
    if not call.graded:
        return forward, nothing
    return forward, passed(call, mask + 2 * width * scores_of(shape)) if at in call.graded else forward


def _experts(call: KernelCall) -> tuple[Array, Array]:
    """Seconds of a mixture of experts, forward and backward, (K,) each.

    Operands are tokens, their weights, the chosen experts, and the matrices of all experts. Of the tokens that can
    reach a device, its rows are as many as its share of all experts.
    """
    dtype = call.multiplied
    roles = {role: call.extent(factors) for role, factors in call.rule.roles}
    matrices = matrices_of(call.rule)
    computed = call.flops / (2 * len(matrices) * roles["width"] * roles["hidden"])
    shape = ExpertsShape(
        tokens=computed / roles["choices"],
        choices=roles["choices"],
        experts=_held_experts(call, roles["experts"]),
        width=roles["width"],
        hidden=roles["hidden"],
        each=call.software.grouped,
        added=call.software.adds_in_fp32(call.dtype),
        sorted_again=_exchanged(call, roles["experts"]) if call.software.grouped else 0.0,
        fused=call.software.fused_experts,
        by_element=call.software.sorts_elements,
        first=len(matrices) - 1,
    )
    forward = np.asarray(experts_time(shape, dtype, call.device))
    if not call.graded:
        backward = np.zeros(len(call.extents))
    else:
        rows, weights = not {0, 1}.isdisjoint(call.graded), not {*matrices}.isdisjoint(call.graded)
        backward = np.asarray(experts_backward_time(shape, dtype, call.device, rows=rows, weights=weights))
    return _cast_experts(call, shape, (forward, backward)) if call.rule.casts else (forward, backward)


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
    each = _APART_EACH * len(matrices) * call.device.launch_latency if _expert_by_expert(call) else shape.each
    bare = replace(shape, converted=False, each=each)
    cast = _cast_in_blocks if call.rule.scaled_in_blocks else _cast
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
    casting = cast(call, of_results, backward_casts) + _cast(call, of_results, columns)
    return forward, _gained(call, wide[1], narrow + casting)


def _expert_by_expert(call: KernelCall) -> bool:
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


def _held_experts(call: KernelCall, most: Array) -> Array:
    """Experts whose weights a device has, (K,). `most` is the extent on the device with the most work."""
    if "e" not in call.rule.index:
        return most
    factor = call.rule.factors[call.rule.index["e"]]
    return np.where(most < factor.extent, most / factor.imbalance, most)


def _recurrent(call: KernelCall) -> tuple[Array, Array]:
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


def _index_scores(call: KernelCall) -> tuple[Array, Array]:
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


_SCANS: Mapping[str, Callable[[KernelCall], Any]] = {
    "delta_rule": _delta_rule_shape,
    "selective_scan": _selective_scan_shape,
    "state_space": _state_space_shape,
}
"""Shapes of scans that a framework composes of its operators."""


def _scan(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[[KernelCall], tuple[Array, Array]]:
    """A function for the seconds of a scan, from the functions for its forward and backward pass."""

    def seconds(call: KernelCall) -> tuple[Array, Array]:
        shape, dtype = _SCANS[call.rule.op_class](call), call.multiplied
        if shape.composed and element_bytes(call.dtype) < element_bytes("fp32"):
            dtype = "fp32"  # as `planner.graph` computes it
        ahead = np.asarray(forward(shape, dtype, call.device))
        return ahead, np.asarray(backward(shape, dtype, call.device)) if call.graded else np.zeros(len(call.extents))

    return seconds


_BY_SHAPE: Mapping[str, Callable[[KernelCall], tuple[Array, Array]]] = {
    "attention": _attention,
    "delta_rule": _scan(delta_rule_time, delta_rule_backward_time),
    "experts": _experts,
    "index_scores": _index_scores,
    "matmul": _matmul,
    "recurrent": _recurrent,
    "selective_scan": _scan(selective_scan_time, selective_scan_backward_time),
    "state_space": _scan(state_space_time, state_space_backward_time),
}
