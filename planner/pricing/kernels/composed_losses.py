"""Losses that software computes kernel by kernel, by kernels that a compiler makes, or by one of its own, in fp32.

Bytes per logit, with each operator reading and writing memory. The cast to fp32 before the loss, and the cast of its
gradient, are operators of the graph and are counted there, except where a compiler reads and writes the 16 bits:

    megatron   forward    maximum of the row 4, subtraction 8, exponential 8, sum 4, division 8                       32
               (megatron/core/tensor_parallel/cross_entropy.py: the default, without --cross-entropy-loss-fusion)
    pytorch    forward    log_softmax of rows that do not fit in shared memory: maximum 4, sum 4, result 8            16
               backward   nll_loss: a tensor of zeros 4; log_softmax: sum of the gradient 4, result 12                20
               (aten/src/ATen/native/cuda/SoftMax.cu: cunn_SoftMaxForward, cunn_SoftMaxBackward; NLLLoss)
    pytorch-16 the same kernels, of logits in 16 bits that nothing casts: 8 forward, 10 backward
    inductor   forward    maximum of the row 2, sum of the exponentials 2                                              4
               backward   logits 2, their gradient 2                                                                   4
               (torch/_inductor/decomposition.py: _log_softmax as amax, exp and sum; the scheduler fuses what reads the
               same row; twice as much of logits that are in fp32)
    llm.c      forward    logits 2, their gradient over them 2; a row stays in cache between both                      4
               backward   nothing is left                                                                              0
               (llmc/fused_classifier.cuh: fused_classifier_kernel5, which LLM.Q has, too)

Four layers and the head of a GPT of width 3072 on A100, 64,000 words, 2,048 tokens, take 17.7 ms forward; four layers
alone take 10.6 (sail-sg/VocabularyParallelism, artifact/exp_one_host.csv at 6191c3b). That leaves 7.1 for the head: its
matrix product takes 3.0, and Megatron's count with the cast before it 3.3.
"""

import numpy as np

from costmodels import element_bytes
from planner.pricing.kernels.call import Array, KernelCall, passed

INDUCTOR = "inductor"
NARROW = "pytorch-16"
CLASSIFIER = "llm.c"

FORWARD = {"megatron": 32.0, "pytorch": 16.0, NARROW: 8.0, INDUCTOR: 8.0, CLASSIFIER: 4.0}
"""Bytes per logit in the forward pass, of logits in fp32."""

BACKWARD = {"pytorch": 20.0, NARROW: 10.0, INDUCTOR: 8.0, CLASSIFIER: 0.0}
"""Bytes per logit in the backward pass, where that is not a single kernel."""

_LONG = 4  # bytes of an element of fp32

KERNELS = 5
"""Operators that a framework launches for it in the forward pass."""


def is_composed_loss(call: KernelCall) -> bool:
    """Whether an operator is a loss that software computes kernel by kernel."""
    return bool(call.software.composed_loss) and call.rule.op == "aten.cross_entropy_loss.default"


def reads_cast(call: KernelCall) -> bool:
    """Whether an operator is a cast that kernels of the loss read through, or a loss whose kernels do."""
    return call.software.composed_loss in (INDUCTOR, NARROW, CLASSIFIER) and call.rule.joins_loss


def composed_loss_seconds(call: KernelCall) -> Array:
    """Seconds of its forward kernels, (K,)."""
    return np.asarray(passed(call, _width(call) * FORWARD[call.software.composed_loss] * _logits(call)))


def composed_loss_backward(call: KernelCall) -> Array | None:
    """Seconds of its backward kernels, (K,); None if it is a single kernel."""
    moved = BACKWARD.get(call.software.composed_loss)
    return None if moved is None else np.asarray(passed(call, _width(call) * moved * _logits(call)))


def _width(call: KernelCall) -> float:
    """The width of what is read of a logit, relative to fp32."""
    compiled = call.software.composed_loss == INDUCTOR
    return 0.5 if compiled and (element_bytes(call.dtype) < _LONG or call.rule.joins_loss) else 1.0


def _logits(call: KernelCall) -> Array:
    return call.extent(tuple(factor for indexed in call.rule.operands[0] for factor in indexed))
