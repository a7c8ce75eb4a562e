"""Time of a mixture of experts on one device, from its shape: grouped products, and the copies around them.

    tokens ──sort, permute──> rows ──gate, up──> silu · weight ──down──> rows ──combine──> tokens
      T h                     R h      R m f           R f                R h                T h

    R = T k rows are spread over e experts on the device, r = i R / e for each. i is the imbalance: the rows of the
    fullest device over the average, 1 where all have the same. Every grouped product is one launch of the library:
    `matmul_time` with the experts as its batch. m is 2 first matrices with a gate, else 1:

        forward     (r, m f, h) + (r, h, f)                                    rows x columns x depth
        backward    (r, f, h) + (r, h, m f)  and  (h, f, r) + (m f, h, r)      of the rows, and of the weights

    with copies at the rate of the classes "copy" and "elementwise":

        forward     permute R h + R h, activation m R f + R f, combine R h + T h        elements read + written
        backward    R h + T h, activation (m + 1) R f + (m + 1) R f, R h + T h
        both        4 R h where rows are sorted again between their exchange and their products

    and the bytes for each of R h that a framework moves `besides` in either pass;

and the launches of the kernels that sort, copy and activate. If there are fewer rows than experts, as many experts get
one row each. If one kernel multiplies, activates and casts to fp8 (`fused`), products read operands that are in fp8
already, and the activation takes no pass of its own. A grouped product is one kernel, which may be `slower` than
`matmul_time`. If the library launches one product per expert instead, each takes `each` seconds more. The gradient of
the weights is added to one in fp32 where the software keeps it so; that gradient is read and written.

The laws of `matmul_time` hold: monotone in T, k, f and h, and c times the tokens take at most c times as long.

Not included: the exchange of rows between devices, which is a collective; and the imbalance among the experts of one
device, whose products run at the same time.

Source: Gale et al., "MegaBlocks: efficient sparse training with mixture-of-experts", arXiv 2211.15841. Against measured
kernels: `tests/validation/test_experts.py`.
"""

import math
from dataclasses import dataclass

import numpy as np

from costmodels.errors import CostModelError
from costmodels.kernels.compute import operator_time
from costmodels.kernels.matmul import element_bytes, matmul_time, weight_gradient_time
from costmodels.units import Quantity
from hardware_profiles import Device

BALANCED = 1.0
"""The imbalance of a router that gives every expert the same number of rows."""

_SORTING = 3  # kernels: sort the expert numbers, count them, sum them up


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """Extents on one device: numbers, or arrays of one shape (K,).

    Attributes:
        tokens: T, tokens that the device routes.
        choices: k, experts of each token.
        experts: e, experts whose weights the device has. It computes T k rows, whichever devices they come from.
        width: f, hidden size of an expert.
        hidden: h, hidden size of a token.
        imbalance: i, rows of the fullest device over the average.
        each: extra seconds per expert and grouped product where the library launches one product per expert.
        added: whether gradients of weights are added to gradients in fp32.
        sorted_again: 1 where rows are sorted by expert once more after their exchange, and back before it, else 0.
        fused: whether activations and casts are part of the kernels of products.
        besides: bytes for each element of R h beyond the copies above, forward and backward.
        converted: whether products in fp8 include the cast of their rows.
        first: m, number of matrices of the first product (2 with a gate).
        slower: how many times longer products take than `matmul_time` says.
    """

    tokens: Quantity
    choices: Quantity
    experts: Quantity
    width: Quantity
    hidden: Quantity
    imbalance: float = BALANCED
    each: float = 0.0
    added: bool = False
    sorted_again: Quantity = 0.0
    fused: bool = False
    besides: tuple[float, float] = (0.0, 0.0)
    converted: bool = True
    first: int = 2
    slower: float = 1.0


def once_share(chosen: int, parts: int, groups: int = 1, chosen_groups: int = 1) -> float:
    """Share of the T k rows that are sent if a token goes only once to each part in which it has chosen an expert.

    With n parts and k independent choices: n (1 - (1 - 1/n)^k) / k.

    A router may choose experts in M of G groups only, each set of M equally likely (node-limited routing: DeepSeek-AI
    2024, arXiv 2412.19437, section 2.1.2). Of the s groups of a part, j are chosen with the probability P(j) of drawing
    M of G. Then no choice falls on the part with probability (1 - j/M)^k, and the share is n (1 - sum_j P(j) (1 -
    j/M)^k) / k. If a group spans t parts, a choice falls on one of M t parts. If neither the groups divide the parts
    nor the parts the groups, groups are ignored.
    """
    if groups == 1 or chosen_groups >= groups or max(parts, groups) % min(parts, groups):
        return parts * (1 - (1 - 1 / parts) ** chosen) / chosen
    if parts >= groups:
        within = chosen_groups * parts // groups
        return within * (1 - (1 - 1 / within) ** chosen) / chosen
    own, ways = groups // parts, math.comb(groups, chosen_groups)
    missed = sum(
        math.comb(own, j) * math.comb(groups - own, chosen_groups - j) / ways * (1 - j / chosen_groups) ** chosen
        for j in range(min(own, chosen_groups) + 1)
        if chosen_groups - j <= groups - own
    )
    return parts * (1 - missed) / chosen


def experts_time(shape: ExpertsShape, dtype: str, device: Device) -> Quantity:
    """Seconds of the forward pass, element-wise.

    Raises:
        CostModelError: an extent or an imbalance below 1.
        hardware_profiles.UnknownKeyError: the device has no figures for the dtype.
    """
    rows, each, groups = _rows(shape)
    h, f = shape.hidden, shape.width
    cast = 0.0 if shape.fused else 1.0
    converted = cast * shape.converted
    products = matmul_time(each, shape.first * f, h, groups, dtype, device, converted=converted)
    products = products + matmul_time(each, h, f, groups, dtype, device, converted=converted)
    copied = (3 + 4 * shape.sorted_again) * rows * h + shape.tokens * h
    activated = (shape.first + 1) * rows * f * cast + _besides(shape, 0, rows, dtype)
    launched = 2 * shape.each * groups
    return shape.slower * products + launched + _moved(copied, activated, _SORTING + 2, dtype, device)


def experts_backward_time(shape: ExpertsShape, dtype: str, device: Device, *, rows: bool, weights: bool) -> Quantity:
    """Seconds of the backward pass, element-wise.

    Args:
        shape: extents.
        dtype: dtype of the products.
        device: the device.
        rows: compute the gradients of the rows (tokens, and the weights of their experts).
        weights: compute the gradients of the experts' weights.

    Raises: as `experts_time`.
    """
    count, each, groups = _rows(shape)
    h, f = shape.hidden, shape.width
    copied = 2 * (count * h + shape.tokens * h) + 4 * shape.sorted_again * count * h
    cast = 0.0 if shape.fused else 1.0
    activated = 2 * (shape.first + 1) * count * f * cast + _besides(shape, 1, count, dtype)
    time = _moved(copied, activated, 2, dtype, device)
    if rows:
        time = time + 2 * shape.each * groups
        converted = cast * shape.converted
        for m, n in ((f, h), (h, shape.first * f)):
            time = time + shape.slower * matmul_time(each, m, n, groups, dtype, device, converted=converted)
    if weights:
        time = time + 2 * shape.each * groups
        for m, n in ((h, f), (shape.first * f, h)):
            time = time + shape.slower * weight_gradient_time(m, n, each, groups, dtype, device, added=shape.added)
    return time


def _besides(shape: ExpertsShape, which: int, rows: Quantity, dtype: str) -> Quantity:
    """Traffic of a framework's other passes over the rows, in elements of the dtype."""
    nbytes = shape.besides[which]
    return nbytes / max(2, element_bytes(dtype)) * rows * shape.hidden if nbytes else 0.0


def _rows(shape: ExpertsShape) -> tuple[Quantity, Quantity, Quantity]:
    """Rows on the device, rows of each expert that has any, and the number of such experts."""
    if not shape.imbalance >= 1:
        raise CostModelError(f"an imbalance of {shape.imbalance:g}: the fullest device has the average or more")
    rows = shape.tokens * shape.choices * shape.imbalance
    return rows, np.maximum(rows / shape.experts, 1.0), np.minimum(rows, shape.experts)


def _moved(copied: Quantity, activated: Quantity, copies: int, dtype: str, device: Device) -> Quantity:
    """Seconds of sorting and copying rows, and of the activation."""
    width = max(2, element_bytes(dtype))
    copying = operator_time(
        op_class="copy", flops=0.0, bytes_moved=copied * width, dtype=dtype, device=device, kernels=copies
    )
    activating = operator_time(
        op_class="elementwise", flops=0.0, bytes_moved=activated * width, dtype=dtype, device=device
    )
    return copying + activating
