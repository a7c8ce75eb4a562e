"""The dtype of matrix products alone, during a step.

    tf32    operands in fp32 lose all but 10 mantissa bits inside of the product; sums are in fp32

PyTorch has one setting per process. So it is set while a step runs, and then restored. Devices without such products
compute in fp32, as CPUs do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from planner.plan.plan import products_in


@contextmanager
def narrow_products(precision: str) -> Iterator[None]:
    """Inside of this context, products on CUDA devices use this precision."""
    products = products_in(precision)
    if not products:
        yield
        return
    cudnn: Any = torch.backends.cudnn
    asked: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    before = [one.fp32_precision for one in asked]
    try:
        for one in asked:
            one.fp32_precision = products
        yield
    finally:
        for one, word in zip(asked, before, strict=True):
            one.fp32_precision = word
