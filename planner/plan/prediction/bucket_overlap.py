"""Buckets of gradients that travel under the backward pass: which of them, and from when.

    last backward pass   head | block 3   | block 2   | block 1   | block 0   | embedding
    buckets of the rank             [bucket 0 .......][bucket 1 ......][bucket 2 ..|...]  what is left is waited for
                                   full with block 3   with block 2     with the embedding

The runtime starts a bucket when the last of its members has its gradient of the last micro-batch
(`runtime.update.reduction`), so that is when `costmodels.simulate` lets it start: with the block that makes it. They
travel one after the other. Those that have no room on the way, and gradients that share no bucket, follow the pass.

The sums that a search minimises have all of them waited for, an upper bound; what a plan states is the step.
"""

from collections.abc import Iterable, Mapping

from hardware_profiles import Seconds
from planner.plan.binding.bind import BoundPlan
from planner.sharding.buckets import Bucket


def slots_of(
    bound: BoundPlan, used: Mapping[str, int], early: Iterable[tuple[Bucket, Seconds]]
) -> dict[int, list[Seconds]]:
    """For each chunk of a rank that makes buckets of gradients, the seconds of those that start with each of its
    blocks, the last block first. `used` has the chunk of every parameter of the rank, `early` the buckets that start in
    its backward pass and the seconds that each travels."""
    blocks, consumers = bound.blocks, bound.graph.consumers
    held: dict[int, list[int]] = {}
    for name, chunk in used.items():
        for at in consumers.get(name, ()) if name in bound.parameters else ():
            number = blocks.block_of(at)
            if number is not None and number not in held.setdefault(chunk, []):
                held[chunk].append(number)
    order = {chunk: sorted(numbers, reverse=True) for chunk, numbers in held.items()}
    found: dict[int, list[Seconds]] = {}
    for bucket, seconds in early:
        last = bucket.members[-1].name
        chunk, first = used[last], min(consumers[last])
        numbers, number = order.get(chunk, []), blocks.block_of(first)
        slots = found.setdefault(chunk, [0.0] * max(1, len(numbers)))
        if number in numbers:
            slots[numbers.index(number)] += seconds
        else:  # of what follows the blocks, or comes before them
            slots[0 if first >= blocks.stop else -1] += seconds
    return found
