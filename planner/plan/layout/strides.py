"""How tensors lie in memory, as strides: which tensors are views of which, and which have to be copied.

    (2, 8, 4)          strides (32, 4, 1)     lies without gaps, dims in order
    transposed         (2, 4, 8)              (32, 1, 4)
    viewed as (8, 8)   there are no strides for it: the first two dims do not follow each other, and it is copied

As PyTorch has it: views by `computeStride` of aten/src/ATen/TensorUtils.cpp, results of elementwise operators by
`reorder_dimensions` of aten/src/ATen/TensorIterator.cpp.
"""

import math
from collections.abc import Sequence

from planner.sharding.rule import Rule

Shape = Sequence[int]
Strides = tuple[int, ...]


def in_order(shape: Shape) -> Strides:
    """Strides of a tensor without gaps."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def lies_in_order(shape: Shape, strides: Strides) -> bool:
    """Whether a tensor has no gaps and its dims in order; dims of extent 1 lie anywhere."""
    return all(
        stride == usual for extent, stride, usual in zip(shape, strides, in_order(shape), strict=True) if extent != 1
    )


def reshaped(shape: Shape, strides: Strides, wanted: Shape) -> Strides | None:
    """Strides of a view of another shape; None where there is none."""
    dims = [(extent, stride) for extent, stride in zip(shape, strides, strict=True) if extent != 1]
    found, place = [0] * len(wanted), len(wanted) - 1
    while dims:
        extent, stride = dims.pop()
        run, made = extent, 1
        while dims and dims[-1][1] == run * stride:
            run *= dims.pop()[0]
        while place >= 0 and (made < run or wanted[place] == 1):
            found[place] = made * stride
            made *= wanted[place]
            place -= 1
        if made != run:
            return None
    return tuple(found)


def viewed(rule: Rule, operand: int, result: int, strides: Strides) -> Strides:
    """Strides of a view with the dims of its operand in any order, and others: part of a dim that the view then lacks,
    or dims of the same tensor repeated."""
    lies = {factors: stride for factors, stride in zip(rule.operands[operand], strides, strict=True) if factors}
    lacking = [factors for factors in lies if factors not in rule.results[result]]
    other = lies[lacking[0]] if len(lacking) == 1 else 0
    return tuple(lies.get(factors, other) for factors in rule.results[result])


def spread(wanted: Shape, shape: Shape, strides: Strides) -> Strides:
    """Strides of a tensor that is broadcast to another shape."""
    own = tuple(0 if extent == 1 else stride for extent, stride in zip(shape, strides, strict=True))
    return (0,) * (len(wanted) - len(shape)) + own


def spread_back(rule: Rule, operand: int, strides: Strides) -> Strides:
    """Strides of the gradient of an operand that is a view of the gradient of the result: of a view in another order,
    or of a sum."""
    lies = {factors: stride for factors, stride in zip(rule.results[0], strides, strict=True) if factors}
    return tuple(lies.get(factors, 0) for factors in rule.operands[operand])


def elementwise(shape: Shape, operands: Sequence[tuple[Shape, Strides]]) -> Strides:
    """Strides of the result of an elementwise operator: without gaps, dims in the order of the first operand that has
    one."""
    each = [spread(shape, *operand) for operand in operands]

    def after(one: int, other: int) -> int:
        for strides in each:
            if 0 in (strides[one], strides[other]):
                continue
            if strides[one] != strides[other]:
                return 1 if strides[one] > strides[other] else -1
            if shape[one] > shape[other]:
                return 1
        return 0

    order = list(range(len(shape)))[::-1]  # from the innermost dim on
    for end in range(1, len(order)):
        moved = end
        for at in reversed(range(end)):
            told = after(order[at], order[moved])
            if told < 0:
                break
            if told > 0:
                order[at], order[moved] = order[moved], order[at]
                moved = at
    found = dict(zip(order, in_order([shape[dim] for dim in order[::-1]])[::-1], strict=True))
    return tuple(found[dim] for dim in range(len(shape)))


def folded(shape: Shape, strides: Strides, kept: int) -> bool:
    """Whether all dims but the `kept` last can be viewed as one."""
    lead = len(shape) - kept
    return reshaped(shape, strides, (math.prod(shape[:lead]), *shape[lead:])) is not None
