"""Refuses row or class numbers that do not exist, where a table is sharded, as PyTorch's unsharded kernels do.

A rank returns zeros for a row that is not in its piece, because another rank has it. A row that no rank has would give
zeros everywhere: an embedding of zeros, a loss that is too large, and silent training on them.
"""

import torch


def expect_within(numbers: torch.Tensor, count: int, what: str, ignored: int | None = None) -> None:
    """Raise RuntimeError where one of `numbers` is not in [0, count) and not `ignored`. On accelerators this does not
    block: the device stops with an assertion, as in PyTorch's own kernels."""
    known = (numbers >= 0) & (numbers < count)
    if ignored is not None:
        known |= numbers == ignored
    torch._assert_async(
        known.all(),
        f"{what}: an index is not in 0 to {count - 1}"
        + ("" if ignored is None else f", and is not the ignored {ignored}"),
    )
