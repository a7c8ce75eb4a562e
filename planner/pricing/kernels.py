"""Seconds of an operator's kernels on local shapes, forward and backward, by the class of the operator.

Matrix products and attention are priced by shape, everything else by the roofline of its class. A rule says enough to
find the shape of a product C = A B, on extents that a strategy has divided:

    batch   factors of A, B and C             linear   b s i, o i -> b s o       m = b s,  n = o,  k = i
    k       of A and B, not of C              bmm      e m k, e k n -> e m n     batch = e
    m       of A, not of B
    n       of B, not of A

Its gradients are products too, dA = dC B^T of shape (m, k, n) and dB of shape (n, k, m), one kernel each. A third
operand, which joins the sum, is added by the kernel that writes C, and its gradient is summed up by one that reads dC;
both are taken as free.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from costmodels import (
    AttentionShape,
    ExpertsShape,
    attention_backward_time,
    attention_time,
    experts_backward_time,
    experts_time,
    matmul_time,
    operator_time,
)
from hardware_profiles import Device
from planner.sharding.rule import Rule

Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelCall:
    """An operator under K strategies: local extents of its factors (K, factors), FLOP and bytes of the forward pass,
    bytes of the backward pass (K,), and the operands that need a gradient."""

    rule: Rule
    extents: Array
    dtype: str
    device: Device
    graded: tuple[int, ...]
    flops: Array
    moved: Array
    moved_backward: Array

    @property
    def worked(self) -> int:
        """Operands whose gradients take work: addends do not."""
        return sum(operand not in self.rule.addends for operand in self.graded)

    def extent(self, factors: frozenset[int] | tuple[int, ...]) -> Array:
        """Product of the local extents of factors, (K,)."""
        return np.asarray(self.extents[:, list(factors)].prod(axis=1))


def kernel_seconds(call: KernelCall) -> tuple[Array, Array]:
    """Seconds of the forward and the backward kernels, (K,) each; no gradients, no backward pass."""
    return _BY_SHAPE.get(call.rule.op_class, _by_work)(call)


def _by_work(call: KernelCall) -> tuple[Array, Array]:
    def seconds(work: Array, moved: Array, kernels: int) -> Array:
        time = operator_time(
            op_class=call.rule.op_class,
            flops=work,
            bytes_moved=moved,
            dtype=call.dtype,
            device=call.device,
            kernels=kernels,
        )
        return np.asarray(time, dtype=np.float64)

    forward = seconds(call.flops, call.moved, 1)
    if not call.graded:
        return forward, np.zeros(len(call.extents))
    work = call.flops * call.rule.backward_work(call.worked)
    return forward, seconds(work, call.moved_backward, max(1, call.worked))


def _matmul(call: KernelCall) -> tuple[Array, Array]:
    rule = call.rule
    first, second = (operand for operand in range(len(rule.operands)) if operand not in rule.addends)
    a, b, c = (
        frozenset(factor for dim in dims for factor in dim)
        for dims in (rule.operands[first], rule.operands[second], rule.results[0])
    )
    m, n, k, batch = call.extent(a - b), call.extent(b - a), call.extent((a & b) - c), call.extent(a & b & c)
    products = [(m, n, k)]
    products += [(m, k, n)] if first in call.graded else []
    products += [(n, k, m)] if second in call.graded else []
    rows, columns, depths = (np.concatenate(extents) for extents in zip(*products, strict=True))
    time = matmul_time(rows, columns, depths, np.tile(batch, len(products)), call.dtype, call.device)
    by_product = np.asarray(time).reshape(len(products), len(m))
    return by_product[0], by_product[1:].sum(axis=0)


def _attention(call: KernelCall) -> tuple[Array, Array]:
    extents = {role: call.extent(factors) for role, factors in call.rule.roles}
    shape = AttentionShape(**extents, causal=call.rule.causal)
    forward = np.asarray(attention_time(shape, call.dtype, call.device))
    if not call.graded:
        return forward, np.zeros(len(call.extents))
    work = call.rule.backward_work(call.worked)
    return forward, np.asarray(attention_backward_time(shape, call.dtype, call.device, work))


def _experts(call: KernelCall) -> tuple[Array, Array]:
    """Operands are tokens, their weights, the experts chosen, and the matrices of all experts."""
    roles = {role: call.extent(factors) for role, factors in call.rule.roles}
    shape = ExpertsShape(
        tokens=roles["tokens"],
        choices=roles["choices"],
        experts=roles["experts"],
        width=roles["width"],
        hidden=roles["hidden"],
    )
    forward = np.asarray(experts_time(shape, call.dtype, call.device))
    if not call.graded:
        return forward, np.zeros(len(call.extents))
    rows, weights = not {0, 1}.isdisjoint(call.graded), not {3, 4, 5}.isdisjoint(call.graded)
    backward = experts_backward_time(shape, call.dtype, call.device, rows=rows, weights=weights)
    return forward, np.asarray(backward)


_BY_SHAPE: Mapping[str, Callable[[KernelCall], tuple[Array, Array]]] = {
    "attention": _attention,
    "experts": _experts,
    "matmul": _matmul,
}
