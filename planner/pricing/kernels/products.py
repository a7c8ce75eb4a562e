"""Seconds of matrix products and convolutions.

A rule is enough to find the shape of a product C = A B, on the extents that a strategy leaves on a device:

    batch   factors of A, B and C             linear   b s i, o i -> b s o       m = b s,  n = o,  k = i
    k       of A and B, not of C              bmm      e m k, e k n -> e m n     batch = e
    m       of A, not of B
    n       of B, not of A

A convolution is priced as its implicit GEMM. The roles of its rule name the extents: rows m = n h w and columns n = o
of the result, k = i and the kernel, batch = groups. Elements that overlapping windows share are read from memory once,
so its bytes are those of its tensors. Depthwise convolutions have no columns (`depthwise.py`). No kernel adds the
gradient of its weight to one in fp32: Megatron's hook does (`DistributedDataParallel._make_backward_post_hook`).

The gradients are products too, dA = dC B^T of shape (m, k, n) and dB of shape (n, k, m), one kernel each. A third
operand (a bias) is added by the kernel that writes C, at no cost. Its gradient is a sum over dC. That is free if it is
the epilogue of another product, else see `Software.sums_biases`. In 16 bits, rows of n or k elements that are no
multiples of 16 bytes cannot be loaded in whole words: such products take `Device.misaligned` times longer.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from costmodels import element_bytes, matmul_time, weight_gradient_time
from planner.pricing.kernels.call import Array, KernelCall, misaligned, passed
from planner.pricing.kernels.depthwise import at_most_passed

_FP32 = 4  # bytes


def matmul_seconds(call: KernelCall) -> tuple[Array, Array]:
    gained, narrow = call.software.gained, _products(call)
    if gained == 1.0 or not call.software.products:
        return narrow
    wide = _products(replace(call, software=replace(call.software, products="")))
    forward, backward = (gained * one + (1 - gained) * other for one, other in zip(narrow, wide, strict=True))
    return forward, backward


def _products(call: KernelCall) -> tuple[Array, Array]:
    """A product and its two gradients, all in one dtype."""
    rule = call.rule
    if rule.casts:
        return _cast_matmul(call)
    first, second = (operand for operand in range(len(rule.operands)) if operand not in rule.addends)
    m, n, k, batch = _product_shape(call, first, second)
    dtype = call.multiplied
    slower = misaligned(call, dtype, n, k)
    products = [(m, n, k)]
    products += [(m, k, n)] if first in call.graded else []
    rows, columns, depths = (np.concatenate(extents) for extents in zip(*products, strict=True))
    moved = np.tile(call.moved, len(products)) if rule.roles else None
    scaled = dtype == "fp8" and call.software.current_scaling
    own = np.concatenate(_own_shares(call, first, second)[: len(products)]) if scaled else np.ones(len(rows))
    cast = own if scaled else np.repeat([call.software.casts, 1.0][: len(products)], len(m))
    several = np.tile(batch, len(products))
    time = np.asarray(matmul_time(rows, columns, depths, several, dtype, call.device, moved, converted=cast))
    if scaled:  # the largest element of each first operand is found before
        time = time + passed(call, element_bytes(call.dtype) * own * rows * depths * several)
    by_product = time.reshape(len(products), len(m)) * slower
    backward = by_product[1:].sum(axis=0)
    wide = call.software.adds_in_fp32(call.dtype)
    if second in call.graded:
        added = wide and not rule.roles and bool((batch == 1).all())  # products of activations are not
        moved = call.moved if rule.roles else None
        weights = weight_gradient_time(n, k, m, batch, dtype, call.device, moved, added=added)
        backward = backward + np.asarray(weights) * slower
        if dtype == "fp8" and not call.software.keeps_fp8:
            backward = backward + cast_seconds(call, dtype, batch * (n + k) * m, scaled=True)
    forward, backward = at_most_passed(call, by_product[0], backward)
    if wide and rule.roles and second in call.graded:
        backward = backward + passed(call, (element_bytes(call.dtype) + 2 * _FP32) * batch * n * k)
    if call.software.sums_biases and any(addend in call.graded for addend in rule.addends):
        backward = backward + passed(call, element_bytes(call.dtype) * batch * m * n)
    return forward, backward


def _cast_matmul(call: KernelCall) -> tuple[Array, Array]:
    """A linear layer whose products have operands that are cast for each product, or none (`Rule.computed`)."""
    m, n, k, batch = _product_shape(call, 0, 1)
    result, inputs, weights = call.rule.computed
    share, weight = call.software.casts, 0.0 if call.rule.narrow else 1.0
    forward = _cast_product(call, result, (m, n, k, batch), share * batch * (m + weight * n) * k)
    backward = np.zeros(len(m))
    if 0 in call.graded:
        backward = backward + _cast_product(call, inputs, (m, k, n, batch), batch * (m * n + share * weight * n * k))
    if 1 in call.graded and weights:
        columns = share * batch * (n + k) * m
        backward = backward + _cast_product(call, weights, (n, k, m, batch), columns, in_columns=True)
    elif 1 in call.graded:
        added = call.software.adds_in_fp32(call.dtype)
        backward = backward + np.asarray(weight_gradient_time(n, k, m, batch, call.dtype, call.device, added=added))
    return forward, backward


def _cast_product(
    call: KernelCall,
    dtype: str,
    extents: tuple[Array, Array, Array, Array],
    cast: Array,
    *,
    in_columns: bool = False,
) -> Array:
    """Seconds of products C (m x n) = A B, and of casting `cast` elements for them.

    `in_columns`: scales are those of columns in every recipe except those of tensors and of blocks of 32. A device
    without products of the dtype computes in the dtype of the tensors, on operands that are cast there and back.
    """
    m, n, k, batch = extents
    device, width = call.device, element_bytes(call.dtype)
    if not device.multiplies(dtype):
        there_and_back = 3 * width + 2 * element_bytes(dtype)  # find the largest: r; cast: r, w; back: r, w
        product = np.asarray(matmul_time(m, n, k, batch, call.dtype, device))
        return product + passed(call, there_and_back * cast)
    blocks = call.rule.scaled_in_blocks and (dtype == "mxfp8" or not in_columns)
    casting = cast_in_blocks_seconds(call, dtype, cast) if blocks else cast_seconds(call, dtype, cast)
    time = np.asarray(matmul_time(m, n, k, batch, dtype, device, converted=0.0)) + casting
    gained = call.rule.gained
    if gained == 1.0:
        return time
    wide = np.asarray(matmul_time(m, n, k, batch, call.dtype, device))
    return np.asarray(gained * time + (1 - gained) * np.maximum(time, wide))


def cast_seconds(call: KernelCall, dtype: str, elements: Array, *, scaled: bool = False) -> Array:
    """Seconds of casting `elements` elements.

    They are read for the largest element, unless they are `scaled` by a value that another product has found, then read
    and written. Both operands of a weight gradient are cast: torchao keeps the original values and casts them once
    more, along the other dim (float8_linear.py: matmul_with_hp_or_float8_args).
    """
    reads = 1 if scaled else 2
    moved = (reads * element_bytes(call.dtype) + element_bytes(dtype)) * elements
    kernel = call.device.matmul_kernel(dtype) if call.device.multiplies(dtype) else None
    return passed(call, moved) if kernel is None or kernel.convert is None else np.asarray(moved / kernel.convert)


def cast_in_blocks_seconds(call: KernelCall, dtype: str, elements: Array) -> Array:
    """Seconds of casting `elements` elements with a scale for each block.

    The largest of 128 is found in registers, so they are read once. Kernels of torchao process 4,096 columns of bf16 at
    2.63 to 2.90 TB/s on H100 (benchmarks/prototype/blockwise_fp8_training/README.md at 55c56d08); elementwise kernels
    reach 2.58 in its profile. Software that `looks_first` reads the elements twice.
    """
    reads = 2 if call.software.looks_first else 1
    return passed(call, (reads * element_bytes(call.dtype) + element_bytes(dtype)) * elements)


def _own_shares(call: KernelCall, first: int, second: int) -> tuple[Array, Array]:
    """Share of the first operand, and of the gradient of the result, that a device casts, (K,) each.

    If a dim that an operand lacks is sharded, each device has the whole operand. With sequence parallelism each device
    had a part of it before, and Transformer Engine casts that part before the gather
    (pytorch/module/layernorm_linear.py).
    """
    rule = call.rule
    if not call.software.regathers:
        return np.ones(len(call.extents)), np.ones(len(call.extents))
    if rule.roles:
        roles = dict(rule.roles)
        columns, depth = frozenset(roles["columns"]), frozenset(roles["depth"])
    else:
        a, b, c = (factors_of(dims) for dims in (rule.operands[first], rule.operands[second], rule.results[0]))
        columns, depth = b - a, (a & b) - c

    def share(factors: frozenset[int]) -> Array:
        return call.extent(factors) / math.prod(rule.factors[factor].extent for factor in factors)

    return share(columns), share(depth)


def factors_of(dims: Sequence[Sequence[int]]) -> frozenset[int]:
    return frozenset(factor for dim in dims for factor in dim)


def _product_shape(call: KernelCall, first: int, second: int) -> tuple[Array, Array, Array, Array]:
    """Extents m, n, k and batch of the forward product, (K,) each: from the roles of the rule, or from its operands."""
    rule = call.rule
    if rule.roles:
        extents = {role: call.extent(factors) for role, factors in rule.roles}
        return extents["rows"], extents["columns"], extents["depth"], extents["batch"]
    a, b, c = (factors_of(dims) for dims in (rule.operands[first], rule.operands[second], rule.results[0]))
    return call.extent(a - b), call.extent(b - a), call.extent((a & b) - c), call.extent(a & b & c)
