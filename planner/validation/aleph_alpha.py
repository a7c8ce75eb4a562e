"""What the framework of Aleph Alpha does otherwise than Megatron-LM (github Aleph-Alpha/scaling, published later than
its runs in Hagemann et al. 2023, arXiv 2311.05610, of which nobody says more than that the framework was theirs).

Logits are gathered whole on every tensor parallel device (`parallel_output` of ColumnParallelLinear is False unless the
head says otherwise, src/scaling/core/nn/linear and src/scaling/transformer/model/layers/lm_head.py), in which each
computes PyTorch's cross entropy of all words in fp32 (src/scaling/transformer/model/losses/cross_entropy.py).

Its stages hold equally many items, of which embedding, last norm and head are one each, unless it is told to balance
parameters (`pipe_partition_method`). How these runs were told nobody says, and they are not priced so.
"""

from planner.validation.rows import Row
from planner.validation.words import mentions


def is_aleph_alpha(row: Row) -> bool:
    """Whether a row is from their repositories."""
    return mentions(row.text("source_locator").lower(), r"aleph-alpha/")
