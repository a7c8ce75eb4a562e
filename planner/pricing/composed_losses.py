"""Losses that Megatron-LM computes kernel by kernel: cross entropies over vocabularies in parts, in fp32.

Bytes of a logit, each operator reading and writing memory (megatron/core/tensor_parallel/cross_entropy.py: the default,
without --cross-entropy-loss-fusion); the cast to fp32 before is an operator of the graph, and counted there:

    forward    largest of the row 4, subtracted 8, exponential 8, summed 4, divided 8                                 32

Four layers and the head of a GPT of width 3072 on A100, 64,000 words, 2,048 tokens, take 17.7 ms forward where four
layers alone take 10.6 (sail-sg/VocabularyParallelism, artifact/exp_one_host.csv at 6191c3b): 7.1 for the head, of which
its product is 3.0, and this count with the cast before it 3.3.
"""

import numpy as np

from planner.pricing.kernel_call import Array, KernelCall, passed

FORWARD = 32.0
"""Bytes of a logit."""

KERNELS = 5
"""Operators that a framework launches for it, forward."""


def is_composed_loss(call: KernelCall) -> bool:
    """Whether an operator is a loss that software computes kernel by kernel."""
    return call.software.composed_loss and call.rule.op == "aten.cross_entropy_loss.default"


def composed_loss_seconds(call: KernelCall) -> Array:
    """Seconds of its forward kernels, (K,)."""
    logits = call.extent(tuple(factor for indexed in call.rule.operands[0] for factor in indexed))
    return np.asarray(passed(call, FORWARD * logits))
