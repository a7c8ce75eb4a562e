"""Operators that a framework launches for one operator of the graph, and the seconds that the host takes for them."""

import numpy as np

from costmodels import FREE_OP_CLASS
from planner.pricing.kernels import composed_losses
from planner.pricing.kernels.call import Array, KernelCall
from planner.pricing.kernels.composed_gelu import GELU_KERNELS, is_composed_gelu
from planner.pricing.kernels.composed_norms import KERNELS, is_composed
from planner.pricing.kernels.dropped_branches import dropped_launches
from planner.pricing.kernels.engine_launches import engine_launches
from planner.pricing.kernels.experts import expert_by_expert, held_experts
from planner.pricing.kernels.scans import SCANS
from planner.pricing.kernels.unfused_attention import SOFTMAX_KERNELS, UNFUSED_KERNELS, in_fp32, is_unfused
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

CAST_KERNELS = 5
"""Operators that a framework launches for a product whose operands it casts: the largest element of each, the cast of
each, the product."""


def host_seconds(call: KernelCall) -> tuple[Array, Array]:
    """Seconds that the host takes to launch the operator, forward and backward, (K,) each."""
    more = SOFTMAX_KERNELS * in_fp32(call) if is_unfused(call) else np.zeros(len(call.extents))
    if expert_by_expert(call):
        blocks = call.rule.scaled_in_blocks and call.rule.computed[0] == "fp8"
        apart = (APART_IN_BLOCKS if blocks else APART_KERNELS) * len(matrices_of(call.rule))
        more = more + apart * held_experts(call, call.extent(dict(call.rule.roles)["experts"]))
    each, launched = call.device.host_latency * call.software.host, _launched(call)
    back = launched + _launched_besides(call) if launched else 0
    if launched and call.software.engine_launches and call.rule.op_class not in (*SCANS, "experts", "cross_entropy"):
        launched, back = engine_launches(call)
    if launched:
        own = dropped_launches(call)
        launched, back = launched + own, back + own
    if call.rule.op_class in SCANS:
        within = SCANS[call.rule.op_class](call).launched  # PyTorch launches these itself, without other software
        ahead, behind = (call.device.host_latency * count for count in within)
        return np.asarray(each * launched + ahead), np.asarray(each * back + behind)
    return np.asarray(each * (launched + more)), np.asarray(each * (back + more))


def _launched(call: KernelCall) -> int:
    """Operators that a framework launches forward for one operator of the graph."""
    experts, graphs = call.rule.op_class == "experts", call.software.graphs
    if call.rule.op_class == FREE_OP_CLASS or graphs == "step" or (graphs == "attention" and not experts):
        return 0
    if joins_another(call):
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
    if is_composed_gelu(call):
        return GELU_KERNELS
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


def joins_another(call: KernelCall) -> bool:
    """Whether the kernels of the operator behind it compute the operator: those of a product an activation, those of a
    loss the cast of its logits.

    The kernel of a product reads the activation's operands, and writes their gradients with its own.
    """
    activation = call.software.fuses_chains and call.rule.joins_product
    return activation or (composed_losses.reads_cast(call) and not composed_losses.is_composed_loss(call))
