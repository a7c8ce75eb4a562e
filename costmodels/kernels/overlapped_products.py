"""A product and the collective of its operand or of its result, both in chunks, so that they overlap.

    arrives    sent     0 1 2 3             chunk k is multiplied when it has arrived, while chunk k + 1 does
               product    0 1 2 3
    leaves     product  0 1 2 3 u u         chunk k leaves when it is made, while chunk k + 1 is, and the last under
               sent       0 1 2 3           other work (u), which needs none of them

With C chunks of p seconds of products and c seconds of sending each (Wang et al. 2023, "Overlap Communication with
Dependent Computation via Decomposition in Large Deep Learning Models", section 4):

    arrives    c + (C - 1) max(p, c) + p + u
    leaves     max(p + (C - 1) max(p, c) + c,  C p + u)

The first chunk (or the last) is always exposed, unless other work covers it. Products of few rows take longer than
their share, and every collective has its latency; the caller puts both into p and c. Not good for: communication that
takes cores or memory bandwidth from products.
"""

import numpy as np

from costmodels.errors import CostModelError
from costmodels.units import Quantity


def arriving_time(product: Quantity, sent: Quantity, chunks: int, under: Quantity = 0.0) -> Quantity:
    """Seconds until all chunks have arrived and are multiplied, and the work `under` after them is done; element-wise.

    `product` and `sent` are seconds of one chunk. Raises CostModelError for less than one chunk.
    """
    _check(chunks)
    return sent + (chunks - 1) * _longer(product, sent) + product + under


def leaving_time(product: Quantity, sent: Quantity, chunks: int, under: Quantity = 0.0) -> Quantity:
    """Seconds until all chunks are made and sent, and the work `under` beside the last one is done; element-wise.

    `product` and `sent` are seconds of one chunk. Raises CostModelError for less than one chunk.
    """
    _check(chunks)
    return _longer(product + (chunks - 1) * _longer(product, sent) + sent, chunks * product + under)


def _longer(one: Quantity, other: Quantity) -> Quantity:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.maximum(one, other)
    return max(one, other)


def _check(chunks: int) -> None:
    if chunks < 1:
        raise CostModelError(f"a collective goes in at least one chunk, got {chunks}")
