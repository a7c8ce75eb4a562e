"""Gradient buckets that overlap with the backward pass: which ones, and from when.

    last backward pass   head | block 3   | block 2   | block 1   | block 0   | embedding
    buckets of the rank          [bucket 0 .......][bucket 1 ......]     [bucket 2 ..|...]  the rest is exposed
                             full inside of block 3   of block 2          of block 0

The runtime starts a bucket when the last of its members has its gradient of the last micro-batch
(`runtime.update.reduction`). So `costmodels.simulate` lets it start there: behind the sixteenth of a block that makes
that gradient, by the seconds of the backward pass of its operators. Buckets are sent one after the other. Those that do
not finish within the pass, and gradients outside of buckets, follow the pass.

The search's objective subtracts what the pass covers of them (`planner.plan.prediction.step.covered_reductions`), as if
ranks did not wait for each other; a plan states the step time.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from hardware_profiles import Seconds
from planner.plan.binding.bind import BoundPlan
from planner.sharding.buckets import Bucket


def slots_of(
    bound: BoundPlan,
    used: Mapping[str, int],
    early: Iterable[tuple[Bucket, Seconds]],
    backward: Callable[[int], Sequence[Seconds]],
) -> dict[int, list[Seconds]]:
    """For each chunk of a rank that makes buckets of gradients, the seconds of the buckets that start behind each of
    equal slots of its backward pass.

    There are `SLOTS` slots for the operators after the blocks, if the chunk has them, and for each of its blocks, the
    last block first. Operators before the blocks finish with the last slot, at the end of the pass. Without repeated
    blocks the buckets are parts of equal length.

    Args:
        bound: the plan.
        used: the chunk of every parameter of the rank.
        early: the buckets that start in its backward pass, and the seconds of each.
        backward: the seconds of the backward pass of each operator of a block."""
    consumers, numbers = bound.graph.consumers, bound.blocks.numbers
    parts: dict[int, set[int]] = {chunk: set() for chunk in used.values()}
    for name, chunk in used.items():
        for at in consumers.get(name, ()) if name in bound.parameters else ():
            parts[chunk].add(numbers[at] if at in numbers else _part(bound, at))
    found: dict[int, list[Seconds]] = {}
    for bucket, seconds in early:
        last = bucket.members[-1].name
        at = min(consumers[last])
        chunk, part = used[last], _part(bound, at)
        order = sorted(parts[chunk] - {_BEFORE}, reverse=True)
        if not bound.blocks.count:
            found.setdefault(chunk, []).append(seconds)
            continue
        slots = found.setdefault(chunk, [0.0] * SLOTS * max(1, len(order)))
        if part not in order:
            slots[-1] += seconds
            continue
        done = _done(bound, at, backward) if part < bound.blocks.count else 1.0
        slots[order.index(part) * SLOTS + max(0, math.ceil(done * SLOTS - _EXACT) - 1)] += seconds
    return found


def _done(bound: BoundPlan, at: int, backward: Callable[[int], Sequence[Seconds]]) -> float:
    """The share of the backward pass of its block that is over once an operator has finished its own."""
    number = bound.blocks.block_of(at)
    assert number is not None, "it is in a block"
    whole = backward(number)
    total = sum(whole)
    return sum(whole[at - bound.blocks.borders[number] :]) / total if total else 1.0


SLOTS = 16
"""The number of slots in the backward pass of a block behind which buckets start: buckets are seldom smaller than a
slot."""
_EXACT = 1e-9  # rounding error of sums
_BEFORE = -1


def _part(bound: BoundPlan, at: int) -> int:
    """The block of an operator; the number of blocks for operators after them, and -1 for operators before them."""
    number = bound.blocks.block_of(at)
    if number is not None:
        return number
    return bound.blocks.count if at >= bound.blocks.stop else _BEFORE
