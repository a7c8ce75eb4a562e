"""Matrix products in a dtype that is that of products alone, while a plan is trained in it.

    tf32    operands in fp32 lose all but 10 bits of their fractions inside of the product, which is summed up in fp32

PyTorch says it once for the process. So it is said while a step runs, and taken back. Devices without such products
compute in fp32, as CPUs do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from planner.plan.plan import products_in


@contextmanager
def narrow_products(precision: str) -> Iterator[None]:
    """While it is entered, products of CUDA devices are those of the precision."""
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
