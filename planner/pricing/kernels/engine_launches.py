"""Operators that Megatron-Core launches for a dense operator, by count of its code, where `Software.engine_launches`.

    operator of the graph      forward   backward
    linear                     1         one for each operand that needs a gradient (dgrad, wgrad), for its bias the sum
                                         of the gradient and its addition to main_grad
    a further linear layer     0         0: queries, keys and values are one product, and so are gate and up
     of the same input
    norm                       1         2 (Transformer Engine sums the gradients of weights in a second kernel),
                                         and the addition of each to main_grad
    attention                  1         1, and one that joins the gradients of queries, keys and values
    rotation of heads          1         1 (apply_rope_fusion)
    activation of a gate       0         0: one kernel with the product behind it
    addition of a branch       1         1 for the sum of both gradients of its input, 1 where dropout is in it

Weight gradients of linear layers are added to main_grad by their own kernel; all other gradients are added by a hook
of each parameter in each micro-batch (megatron/core/distributed/distributed_data_parallel.py:
`_make_backward_post_hook`, `param.main_grad.add_(param.grad.data)`). Layers are those of transformer_layer.py,
attention.py and mlp.py in megatron/core/transformer at d98e8a64dd, modules of transformer_engine/pytorch/module.
Experts are counted in `launches`.
"""

from planner.pricing.kernels.call import KernelCall

BY_ATTENTION = (1, 2)
"""Launches of fused attention, forward and backward."""

OF_A_BIAS = 2
"""Launches for the gradient of a bias: its sum over rows, and its addition to main_grad."""

OF_A_NORM = 2
"""Kernels of a norm's backward pass."""


def engine_launches(call: KernelCall) -> tuple[int, int]:
    """Operators that Megatron-Core launches for a dense operator of the graph, forward and backward."""
    rule, worked = call.rule, max(1, call.worked)
    if rule.joins_projection or rule.joins_product:
        return 0, 0
    if rule.op_class == "matmul":
        biases = sum(addend in call.graded for addend in rule.addends)
        return 1, worked + OF_A_BIAS * biases
    if rule.op_class == "normalisation":
        return 1, OF_A_NORM + max(0, len(call.graded) - 1)
    if rule.op_class == "attention":
        return BY_ATTENTION
    if rule.op_class == "elementwise" and rule.passes and not rule.composed:
        return 1, 2 if call.software.hidden_dropout == "fused" else 1
    return 1, 1
