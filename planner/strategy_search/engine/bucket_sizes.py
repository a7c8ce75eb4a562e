"""The size of the buckets of gradients of a plan, where that is left to the search.

    large     few messages, hardly any of it latency; but a bucket starts when its last gradient is there, and what is
              in the last one is waited for
    small     starts early, under the rest of the backward pass; every message begins with a latency

A search assumes the size at which latency is a small share of a message (`planner.pricing.bucket_size`). Which is the
fastest depends on how long the backward pass is, that is on the plan: so it is halved as long as steps become shorter.
A gradient that is larger than a bucket starts early where two buckets would have room for it. Where they have not, they
are made so large, if there is memory for that.

Where some of the reductions are exposed all the same, buckets end with blocks: each with one; or each has twice as many
as the one behind it, or three times, down to two halves of the last block, so that few messages keep the link busy, and
the last one, which is exposed, is small. What comes before the blocks is through when the last block is, and goes with
its second half, as far as it goes the same way:

    last backward pass   block 7 | block 6 | block 5 | block 4 | block 3 | block 2 | block 1 | block 0
    buckets              [           7 .. 4                    ][      3 .. 2     ][    1    ][   ][    ...
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, takewhile

from hardware_profiles import Seconds
from planner.limits import reached
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.per_step_communication import reduces_in_buckets, reduction_starts, shares_buckets
from planner.plan.prediction.step import REDUCED_AHEAD, UNCOVERED
from planner.plan.prediction.timeline import REDUCTION
from planner.pricing.bucket_size import room_of, smaller
from planner.sharding.buckets import trainable_positions
from planner.sharding.update import NO_BUCKETS, Update

_WORTH = 2e-3
"""Share of a step that reductions take, from which on sizes are tried."""

_GROWTHS = (2, 3)
"""By which buckets that end with blocks grow."""

_TRIES = 2
"""Sizes in turn that are slower, after which no smaller one is tried."""


def in_faster_buckets(
    bound: BoundPlan, predicted: Callable[[BoundPlan], BoundPlan], fits: Callable[[BoundPlan], bool]
) -> BoundPlan:
    """A plan, priced, with its gradients in smaller buckets, or in such as end with blocks, where its step is shorter
    so and it `fits`. `predicted` prices one."""
    best, tried, slower = _with_room(bound, predicted, fits), bound.plan.training.update, 0
    if _bucketed(bound) <= _WORTH * bound.plan.prediction.step_seconds:
        return best
    while slower < _TRIES and tried.bucket_size and not reached():
        tried = smaller(tried)
        if not tried.bucketed:
            break
        other = predicted(with_update(bound, tried))
        if other.plan.prediction.step_seconds < best.plan.prediction.step_seconds:
            best, slower = other, 0
        else:
            slower += 1
    exposed = dict(best.plan.prediction.time).get(UNCOVERED, 0.0)
    if best.plan.pipeline > 1 or exposed <= _WORTH * best.plan.prediction.step_seconds:
        return best
    for buckets in _of_blocks(bound):
        other = predicted(with_update(bound, replace(bound.plan.training.update, buckets=buckets)))
        if other.plan.prediction.step_seconds < best.plan.prediction.step_seconds and fits(other):
            best = other
    return best


def _with_room(
    bound: BoundPlan, predicted: Callable[[BoundPlan], BoundPlan], fits: Callable[[BoundPlan], bool]
) -> BoundPlan:
    """A plan, or the same with buckets so large that gradients have room on the way which are larger than a bucket, as
    those of experts are, and wait for the end of the backward pass without."""
    update, step = bound.plan.training.update, bound.plan.prediction.step_seconds
    time = dict(bound.plan.prediction.time)
    waits = time.get(REDUCTION, 0.0) - _bucketed(bound)
    if not update.bucket_size or waits <= _WORTH * step or reached():
        return bound
    starts = reduction_starts(bound, bound.parameters.keys())
    if starts.early == len(starts.buckets):
        return bound
    needed, size = max(bucket.takes(bound.plan.mesh) for bucket in starts.buckets), update.bucket_size
    while room_of(size) < needed:
        size *= 2
    other = predicted(with_update(bound, replace(update, buckets=size)))
    return other if other.plan.prediction.step_seconds < step and fits(other) else bound


def _of_blocks(bound: BoundPlan) -> Iterator[tuple[int, ...]]:
    """Positions at which buckets end, so that each has the gradients of one block; or so that the last two have half a
    block each, the last one with what comes before the blocks, and those before them grow by one of `_GROWTHS` from one
    to the next."""
    blocks, consumers = bound.blocks, bound.graph.consumers
    own: dict[int, list[int]] = {}  # positions of the parameters of each block
    for name, position in trainable_positions(bound.graph).items():
        block = blocks.block_of(min(consumers[name])) if consumers.get(name) else None
        if block is not None:
            own.setdefault(block, []).append(position)
    if blocks.count < 2 or len(own) < blocks.count:
        return
    starts = [min(own[block]) for block in range(blocks.count)]
    half = sorted(own[0])[len(own[0]) // 2]
    grown = (takewhile(lambda end: end < blocks.count, map(growth.__pow__, count())) for growth in _GROWTHS)
    for ends in (starts, *((half, *(starts[end] for end in one)) for one in grown)):
        yield tuple(sorted({*ends} - {0}))


def without_needless_buckets(bound: BoundPlan) -> BoundPlan:
    """A plan without buckets where each would have one member, and no gradient would set out earlier in one."""
    update = bound.plan.training.update
    if not update.bucketed or shares_buckets(bound) or reduces_in_buckets(bound):
        return bound
    return with_update(bound, replace(update, buckets=NO_BUCKETS))


def _bucketed(bound: BoundPlan) -> Seconds:
    """Seconds of the buckets that start in the backward pass, on the busiest rank."""
    return -dict(bound.plan.prediction.time).get(REDUCED_AHEAD, 0.0)


def most_saved(bound: BoundPlan) -> Seconds:
    """What buckets of other sizes save of a step at most: what it waits for reductions, in a pipeline all of them."""
    time = dict(bound.plan.prediction.time)
    exposed = time.get(REDUCTION, 0.0) + time.get(UNCOVERED, 0.0)
    return exposed if bound.plan.pipeline > 1 else exposed - _bucketed(bound)


def with_update(bound: BoundPlan, update: Update) -> BoundPlan:
    """A plan that updates its parameters otherwise."""
    training = replace(bound.plan.training, update=update)
    return replace(bound, plan=replace(bound.plan, training=training))
