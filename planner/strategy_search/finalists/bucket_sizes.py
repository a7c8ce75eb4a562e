"""The size of the gradient buckets of a plan, if it is left to the search.

    large     few collectives, hardly any latency; but a bucket starts only when its last gradient is there, and the
              last bucket is exposed
    small     starts early and overlaps with the rest of the backward pass; but every collective has a latency

The search assumes the size at which latency is a small share of a collective (`planner.pricing.bucket_size`). Which
size is fastest depends on the duration of the backward pass, and so on the plan. So the size is halved as long as steps
become shorter. A gradient that is larger than a bucket starts early only if it fits into two buckets. If it does not,
buckets are made that large, if there is memory for it.

If some reductions are still exposed, buckets are tried that end with blocks. Either each bucket has one block, or each
has two or three times as many blocks as the bucket behind it, down to two halves of the last block. Then few
collectives keep the link busy, and the last bucket, which is exposed, is small. The gradients before the blocks are
ready when the last block is, and go with its second half, if they are reduced the same way:

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
"""Bucket sizes are tried if reductions take at least this share of a step."""

_GROWTHS = (2, 3)
"""Factors by which buckets that end with blocks grow."""

_TRIES = 2
"""After this many slower sizes in a row no smaller one is tried."""


def in_faster_buckets(
    bound: BoundPlan, predicted: Callable[[BoundPlan], BoundPlan], fits: Callable[[BoundPlan], bool]
) -> BoundPlan:
    """The plan, priced, with its gradients in smaller buckets, or in buckets that end with blocks, if that makes its
    step shorter and the plan `fits`. `predicted` prices a plan."""
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
    """The plan, or the same plan with buckets so large that gradients larger than a bucket, such as those of experts,
    can start early. Without such buckets they wait for the end of the backward pass."""
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
    """Positions at which buckets end. Each bucket has the gradients of one block; or the last two have half a block
    each, the last one together with what comes before the blocks, and each earlier bucket is larger by one of
    `_GROWTHS`."""
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
    """The plan without buckets if each bucket would have one member and no gradient would start earlier in one."""
    update = bound.plan.training.update
    if not update.bucketed or shares_buckets(bound) or reduces_in_buckets(bound):
        return bound
    return with_update(bound, replace(update, buckets=NO_BUCKETS))


def _bucketed(bound: BoundPlan) -> Seconds:
    """Seconds of the buckets that start in the backward pass, on the busiest rank."""
    return -dict(bound.plan.prediction.time).get(REDUCED_AHEAD, 0.0)


def most_saved(bound: BoundPlan) -> Seconds:
    """An upper bound on what buckets of other sizes save of a step: the exposed reductions, and in a pipeline all
    reductions."""
    time = dict(bound.plan.prediction.time)
    exposed = time.get(REDUCTION, 0.0) + time.get(UNCOVERED, 0.0)
    return exposed if bound.plan.pipeline > 1 else exposed - _bucketed(bound)


def with_update(bound: BoundPlan, update: Update) -> BoundPlan:
    """The plan with another update of its parameters."""
    training = replace(bound.plan.training, update=update)
    return replace(bound, plan=replace(bound.plan, training=training))
