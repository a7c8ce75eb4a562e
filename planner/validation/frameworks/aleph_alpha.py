"""Differences of Aleph Alpha's framework from Megatron-LM (github Aleph-Alpha/scaling, published later than its runs in
Hagemann et al. 2023, arXiv 2311.05610, which only says that the framework was their own).

Logits are gathered whole on every tensor-parallel device (`parallel_output` of ColumnParallelLinear is False unless the
head says otherwise, src/scaling/core/nn/linear and src/scaling/transformer/model/layers/lm_head.py). Each device
computes PyTorch's cross entropy of all words in fp32 (src/scaling/transformer/model/losses/cross_entropy.py).

Its stages hold the same number of items unless it is told to balance parameters (`pipe_partition_method`); embedding,
last norm and head are one item each. The setting of these runs is unknown, and they are not priced so.
"""

from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions


def is_aleph_alpha(row: Row) -> bool:
    """Whether a row comes from their repositories."""
    return mentions(row.text("source_locator").lower(), r"aleph-alpha/")
