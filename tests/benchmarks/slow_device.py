"""A device that computes without a processor of the host, imitated: a product takes as long as at a set rate.

    host       mm ▂ sleeps .......... | mm ▂ sleeps ...... | add ▂
    device     mm ████████████████████ | mm ██████████████ |

Every product (`mm`, `addmm`, `bmm`, those of experts and attention, forward and backward) is computed as always, and
then the thread sleeps until FLOP / rate seconds have passed since it began. So the processor is free for the threads
that move bytes, as the host of an accelerator is while a kernel runs, and what a product takes does not depend on what
else the machine does, as long as it computes faster than the rate. All other operators take what they take. It works
below autograd and below DTensor: what a backward pass and hand-written code compute is slowed down likewise.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from planner.models.experts.grouped import grouped_outer, grouped_product

RATE = 3e9
"""FLOP/s of the imitated device: a tenth or less of what a core of today reaches."""


def _product(left: torch.Tensor, right: torch.Tensor) -> float:
    """FLOP of (.., m, k) by (.., k, n), and of the outer products of m rows of k by m rows of n."""
    return 2.0 * left.numel() * right.shape[-1]


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> float:
    """FLOP of both products of (b, h, s, d), (b, h, t, d), (b, h, t, d), as the price of attention counts them."""
    keys = key.shape[-2]
    return 2.0 * math.prod(query.shape[:-1]) * keys * (query.shape[-1] + value.shape[-1])


_aten = torch.ops.aten
FLOPS: Mapping[Any, Callable[..., float]] = {
    _aten.mm.default: _product,
    _aten.mm.out: _product,
    _aten.bmm.default: _product,
    _aten.addmm.default: lambda _, left, right: _product(left, right),
    _aten.addmm_.default: lambda _, left, right: _product(left, right),
    _aten.baddbmm.default: lambda _, left, right: _product(left, right),
    grouped_product._opoverload: lambda rows, matrices, _: _product(rows, matrices),
    grouped_outer._opoverload: lambda rows, others, _: _product(rows, others),
    _aten._scaled_dot_product_flash_attention_for_cpu.default: lambda q, k, v, *_: _attention(q, k, v),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: lambda _, q, k, v, *__: (
        2.5 * _attention(q, k, v)
    ),
}
"""FLOP of an operator by its tensors. The backward pass of attention computes scores again: five products for two."""


class SlowDevice(TorchDispatchMode):
    """Products take FLOP / rate seconds; `late` counts those that took longer by themselves, `seconds` what all were
    to take."""

    def __init__(self, rate: float = RATE) -> None:
        super().__init__()
        self.rate, self.products, self.late, self.seconds = rate, 0, 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors come by
        flops = FLOPS.get(func)
        if flops is None:
            return func(*args, **(kwargs or {}))
        started = time.perf_counter()
        made = func(*args, **(kwargs or {}))
        wanted = flops(*args) / self.rate
        left = started + wanted - time.perf_counter()
        self.products, self.seconds = self.products + 1, self.seconds + wanted
        if left > 0:
            time.sleep(left)
        else:
            self.late += 1
        return made
