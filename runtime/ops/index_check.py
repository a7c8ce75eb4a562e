"""Numbers of rows or classes that do not exist are refused where a table is split, as PyTorch's whole kernels do.

A rank whose piece lacks a row answers with zeros, as the row is another's. What is nobody's would be zeros everywhere:
an embedding of zeros, a loss that is too large, and training on them without a word.
"""

import torch


def expect_within(numbers: torch.Tensor, count: int, what: str, ignored: int | None = None) -> None:
    """Raise RuntimeError where one of `numbers` is not in [0, count) and not `ignored`. On accelerators nothing waits:
    the device stops with an assertion, as in PyTorch's own kernels."""
    known = (numbers >= 0) & (numbers < count)
    if ignored is not None:
        known |= numbers == ignored
    torch._assert_async(
        known.all(),
        f"{what}: a number lies outside of the {count} that there are, 0 to {count - 1}"
        + ("" if ignored is None else f", and is not {ignored}, which is ignored"),
    )
