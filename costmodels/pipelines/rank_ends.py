"""When each rank of a pipeline ends its step: `costmodels.pipelines.timeline` without events, for long steps.

    row i:   rank 0  F_i  B_(i-w_0)      w_s forwards warm rank s up (1F1B: p-s-1, interleaved: 2(p-s-1) + (v-1)p),
             rank 1  F_i  B_(i-w_1)      then forwards and backwards alternate; a row may have no F or no B for a rank
             ...

1F1B and interleaved 1F1B give every rank the same rows, so all ranks take a row at once, in numpy. In 1F1B the F of a
row go from rank to rank. free(s) is when rank s is through with the row before:

    F_i(s)       = max(A_i(s-1), free(s)) + f_s
    A_i(s)       = max(F_i(s), queue(s)) + t_s           when the transfer of rank s arrives: its sends go one by one
                 = G_s + max_(r<=s) (max(queue(r), free(r) + f_r) + t_r - G_r),   G_s = f_0 + t_0 + .. + f_s + t_s
    B_(i-w_s)(s) = max(free(s), A_(i-w_s)(s+1)) + b_s    rank s+1 took that B, and sent it, in its row i-1

Interleaved, rank s takes row i in wave i + s. Then every input of a turn was made in the wave before: F number i by
rank s-1, or of the chunk before by the last rank; B by rank s+1 in its row i-2, or of the chunk after by the first
rank. Every micro-batch is computed, none is extrapolated: how many it takes until the slowest rank alone sets the pace
depends on the durations. About 10 microseconds for a micro-batch of a chunk, whatever the number of ranks.

Not good for: gathers and other work beside the passes (only sends and reductions are modelled), slices, other orders;
for these see `costmodels.simulate`, which gives the same result here.

Source: the orders are those of `costmodels.pipelines.schedules`; the recurrence is max-plus linear, see Baccelli et
al., "Synchronization and linearity", 1992.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from costmodels.errors import CostModelError
from costmodels.pipelines.pipeline_times import PassSeconds, RankSeconds
from costmodels.pipelines.schedules import in_flight_of_chunks
from costmodels.units import Array, Seconds


class RankEnd(NamedTuple):
    """When a rank ends its last backward pass, and when its step ends, in seconds."""

    passes: Seconds
    step: Seconds


def rank_ends(ranks: Sequence[RankSeconds], micro_batches: int) -> tuple[RankEnd, ...]:
    """The ends of all ranks in 1F1B, interleaved if they have several chunks.

    `max` over the ends of the steps is `simulate(...).seconds`.

    Raises:
        CostModelError: numbers that the schedule cannot take, or communication that only `simulate` models.
    """
    _check(ranks, micro_batches)
    forward = np.array([[_pass_seconds(chunk.forward[0]) for chunk in rank.chunks] for rank in ranks])
    backward = np.array([[_pass_seconds(chunk.backward[0]) for chunk in rank.chunks] for rank in ranks])
    sends = np.array([[(chunk.send_forward, chunk.send_backward) for chunk in rank.chunks] for rank in ranks])
    sends[-1, -1, 0] = sends[0, 0, 1] = 0.0  # the last stage sends nothing forward, the first nothing back
    if len(ranks) == 1 and forward.shape[1] == 1:  # a single rank has nothing to wait for
        ends = micro_batches * (forward + backward)
    elif forward.shape[1] == 1:
        ends = _plain(forward[:, 0], backward[:, 0], sends[:, 0, 0], sends[:, 0, 1], micro_batches)[:, None]
    else:
        ends = _interleaved(forward, backward, sends[..., 0], sends[..., 1], micro_batches)
    return tuple(_end(rank, ends[place], backward[place]) for place, rank in enumerate(ranks))


def _plain(forward: Array, backward: Array, ahead: Array, back: Array, micro_batches: int) -> Array:
    """Ends of the last backward passes under 1F1B, (ranks,); all arguments but the last are seconds, (ranks,).

    `ahead` and `back` are sends forward and backward.
    """
    count = len(forward)
    through = np.cumsum(forward + ahead)
    free, queue = np.zeros(count), np.zeros(count)
    returned = np.zeros(count + 1)  # when the last gradient of each rank arrives; the last rank waits for none
    came = np.zeros(count)
    for row in range(micro_batches + count - 1):
        if row < micro_batches:
            sent = through + np.maximum.accumulate(np.maximum(queue, free + forward) + ahead - through)
            came[1:] = sent[:-1]
            free = np.maximum(came, free) + forward
            queue = np.maximum(sent, queue)
        first, stop = max(0, count - 1 - row), min(count, count - 1 - row + micro_batches)
        ends = np.maximum(free[first:stop], returned[first + 1 : stop + 1]) + backward[first:stop]
        free[first:stop] = ends
        queue[first:stop] = returned[first:stop] = np.maximum(ends, queue[first:stop]) + back[first:stop]
    return free


def _interleaved(forward: Array, backward: Array, ahead: Array, back: Array, micro_batches: int) -> Array:
    """Ends of the last backward passes under interleaved 1F1B, (ranks, chunks), from seconds of the same shape.

    `ahead` and `back` are sends forward and backward.
    """
    count, virtual = forward.shape
    cycle, total = count * virtual, micro_batches * virtual
    place, waves = np.arange(count), np.arange(cycle)[:, None]
    late = 2 * (count - 1) + (virtual - 1) * count  # rows from the first row of rank 0 to its first backward
    # chunks of the forward and the backward that each rank takes in a wave, (cycle, ranks)
    forwards = (waves - place) % cycle // count
    backwards = virtual - 1 - (waves + place - late) % cycle // count
    forward_seconds, backward_seconds = forward[place, forwards], backward[place, backwards]
    ahead_seconds, back_seconds = ahead[place, forwards], back[place, backwards]
    free, queue, ends = np.zeros(count), np.zeros(count), np.zeros((count, virtual))
    passed, returned = np.zeros(count + 1), np.zeros(count + 1)  # passed[s + 1], returned[s]: by rank s, a wave ago
    for wave in range(total + late):
        at = wave % cycle
        first, stop = max(0, wave - total + 1), min(count, wave + 1)
        if first < stop:
            passed[0] = passed[count] if forwards[at, 0] else 0.0
            taken = np.maximum(free[first:stop], passed[first:stop]) + forward_seconds[at, first:stop]
            free[first:stop] = taken
            queue[first:stop] = np.maximum(taken, queue[first:stop]) + ahead_seconds[at, first:stop]
            passed[first + 1 : stop + 1] = queue[first:stop]
        first, stop = max(0, late - wave), min(count, late - wave + total)
        if first < stop:
            returned[count] = returned[0] if backwards[at, count - 1] < virtual - 1 else 0.0
            taken = np.maximum(free[first:stop], returned[first + 1 : stop + 1]) + backward_seconds[at, first:stop]
            free[first:stop] = taken
            queue[first:stop] = np.maximum(taken, queue[first:stop]) + back_seconds[at, first:stop]
            returned[first:stop] = queue[first:stop]
            ends[place[first:stop], backwards[at, first:stop]] = taken
    return ends


def _end(rank: RankSeconds, ends: Array, backward: Array) -> RankEnd:
    """The end of a rank: after its last passes, reductions run in the order in which the chunks are done."""
    queue = 0.0
    for chunk in reversed(range(len(rank.chunks))):
        queue = reductions_end(rank.chunks[chunk].reductions, float(ends[chunk]), float(backward[chunk]), queue)
    passes = float(ends[0])
    return RankEnd(passes=passes, step=max(passes, queue) + rank.optimizer + rank.weight_gather)


def reductions_end(buckets: Sequence[Seconds], end: Seconds, seconds: Seconds, free: Seconds = 0.0) -> Seconds:
    """When the last of some buckets is reduced; they are reduced one after the other, from when the link is `free`.

    The buckets are filled in equal parts of a backward pass that takes `seconds` and is over at `end`.
    """
    for number, bucket in enumerate(buckets, start=1):
        free = max(free, end - seconds * (1 - number / len(buckets))) + bucket
    return free


def _pass_seconds(one: PassSeconds) -> Seconds:
    return one.blocking + max(one.computation, one.overlapped)


def _check(ranks: Sequence[RankSeconds], micro_batches: int) -> None:
    chunks = {len(rank.chunks) for rank in ranks}
    if len(chunks) != 1:
        raise CostModelError(f"a pipeline needs ranks with as many chunks each, got {sorted(chunks)} chunks")
    in_flight_of_chunks(0, len(ranks), chunks.pop(), micro_batches)  # checks the numbers
    for number, rank in enumerate(ranks):
        for chunk in rank.chunks:
            if chunk.gather or chunk.weight_gradient or chunk.reduce_each:
                raise CostModelError(
                    f"rank {number} has gathers, reductions of each pass or weight gradients apart: simulate the step"
                )
            if (len(chunk.forward), len(chunk.backward)) != (1, 1):
                raise CostModelError(f"rank {number} has passes of {len(chunk.forward)} slices: simulate the step")
