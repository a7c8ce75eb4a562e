"""Which operator of a large graph an operator of a small one stands for.

Both are traced from the same code, so they call the same operators in the same order, but for conversions of dtypes: a
model in float32 has none of those that one in 16 bits needs. Conversions between two other operators stand for those
between the same two, in their order.

    large   linear  to  norm  to  linear          small   linear  norm  linear
              a     b    c    d     e                       a      c      e
"""

from collections.abc import Sequence

from planner.graph.operator_graph import CASTS, Operator
from planner.graph.per_replica import called


def twins_in_order(small: Sequence[Operator], large: Sequence[Operator]) -> list[int] | None:
    """For each of some operators the place of its twin among those of the large graph; None where they are others."""
    found, at = list[int](), 0
    for op in small:
        while at < len(large) and called(large[at]) != called(op) and called(large[at]) in CASTS:
            at += 1
        if at == len(large) or called(large[at]) != called(op):
            return None
        found.append(at)
        at += 1
    if any(called(op) not in CASTS for op in large[at:]):
        return None
    return found


def twins_by_name(small: Sequence[Operator], large: Sequence[Operator]) -> list[int] | str:
    """The same by names, where the small graph has fewer operators, as of a model with fewer layers outside of the
    blocks; or the name of an operator that has no twin."""
    places = {op.name: at for at, op in enumerate(large)}
    found = list[int]()
    for op in small:
        at = places.get(op.name)
        if at is None or large[at].op != op.op:
            return op.name
        found.append(at)
    return found
