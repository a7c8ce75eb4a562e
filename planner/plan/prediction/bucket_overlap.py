"""Buckets of gradients that travel under the backward pass: which of them, and from when.

    last backward pass   head | block 3   | block 2   | block 1   | block 0   | embedding
    buckets of the rank          [bucket 0 .......][bucket 1 ......]     [bucket 2 ..|...]  what is left is waited for
                             full inside of block 3   of block 2          of block 0

The runtime starts a bucket when the last of its members has its gradient of the last micro-batch
(`runtime.update.reduction`), so that is when `costmodels.simulate` lets it start: behind the sixteenth of a block that
makes it, by the seconds of the backward pass of its operators. They travel one after the other. Those that have no room
on the way, and gradients that share no bucket, follow the pass.

The sums that a search minimises have what the pass covers of them (`planner.plan.prediction.step.covered_reductions`),
as if ranks waited for nobody; what a plan states is the step.
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
    """For each chunk of a rank that makes buckets of gradients, the seconds of those that start behind each of equal
    slots of its backward pass: `SLOTS` for what follows the blocks, where the chunk has it, and for each of its blocks,
    the last block first. What comes before the blocks is through with the first of them, at the end of the pass. Where
    nothing repeats the buckets are parts of equal length. `used` has the chunk of every parameter of the rank, `early`
    the buckets that start in its backward pass and the seconds that each travels, `backward` the seconds of the
    backward pass of each operator of a block."""
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
    """The share of the backward pass of its block that is over when an operator is through with its own."""
    number = bound.blocks.block_of(at)
    assert number is not None, "it is in a block"
    whole = backward(number)
    total = sum(whole)
    return sum(whole[at - bound.blocks.borders[number] :]) / total if total else 1.0


SLOTS = 16
"""Of the backward pass of a block, in which buckets start: a bucket is seldom a smaller part of one."""
_EXACT = 1e-9  # what sums may be off
_BEFORE = -1


def _part(bound: BoundPlan, at: int) -> int:
    """The block of an operator, one more than the last block behind them, and -1 before them."""
    number = bound.blocks.block_of(at)
    if number is not None:
        return number
    return bound.blocks.count if at >= bound.blocks.stop else _BEFORE
