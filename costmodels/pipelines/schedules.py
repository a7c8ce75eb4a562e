"""The 1F1B pipeline schedules with a flush at the end of the step (PipeDream-flush), plain and interleaved.

    stage 0   F F F F     B F B F B B B          stage s takes p-s forwards, then alternates,
    stage 1     F F F   B F B F B B  B           so it holds min(m, p-s) micro-batches of activations
    stage 2       F F B F B F B B                m micro-batches, p stages
    stage 3         F B F B F B F B

Interleaved, a device holds v chunks of the model instead of one, chunk c on device c mod p. It takes them in turn, p
micro-batches at a time. A chunk is 1/v of the work of a stage, so the pipeline fills and drains v times as fast, for v
times the transfers and more micro-batches in flight:

    stage 0   0 0 1 1 0 . 0 ...                  p = 2, v = 2: chunk 0 of micro-batches 0 and 1, then chunk 1 of them
    stage 1     0 0 1 1 ...

Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021,
section 2.2 and figure 4. Not good for: sends that do not overlap, which need a simulation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from costmodels.errors import CostModelError
from costmodels.units import Quantity, Seconds


def step_time(
    stage_micro_batch_seconds: Sequence[Quantity],
    once_seconds: Sequence[Quantity],
    micro_batches: int,
    virtual: int = 1,
) -> Quantity:
    """Seconds of one step; element-wise where the stages give arrays.

        T = m max_s t_s + (sum_s t_s - max_s t_s) / v + max_s u_s

    The slowest stage sets the pace of all micro-batches. The first micro-batch must also pass the other stages, forward
    and backward: one chunk of each, 1/v of its time, because the other chunks come while the pipeline is full. What a
    stage does once a step comes after its last backward. Exact for chunks of equal time. Otherwise this counts work of
    a faster stage that could overlap the slowest one.

    Args:
        stage_micro_batch_seconds: t_s, forward and backward of one micro-batch through all chunks of stage s, with its
            exposed transfers.
        once_seconds: u_s, what stage s does once per step (gradient reduction, optimizer).
        micro_batches: m >= 1, a multiple of the number of stages where v > 1.
        virtual: v >= 1, the chunks of a stage.

    Raises:
        CostModelError: numbers out of these ranges, or lists of different lengths.
    """
    _check(len(stage_micro_batch_seconds), micro_batches, virtual)
    if len(once_seconds) != len(stage_micro_batch_seconds):
        raise CostModelError(
            f"{len(stage_micro_batch_seconds)} stages, but once_seconds has {len(once_seconds)} entries"
        )
    total = reduce(lambda left, right: left + right, stage_micro_batch_seconds)
    slowest = _largest(stage_micro_batch_seconds)
    if virtual == 1:
        return total + (micro_batches - 1) * slowest + _largest(once_seconds)
    return micro_batches * slowest + (total - slowest) / virtual + _largest(once_seconds)


def least_step_time(
    stage_micro_batch_seconds: Sequence[float], once_seconds: Sequence[float], micro_batches: int, virtual: int = 1
) -> Seconds:
    """Lower bound on a step of 1F1B, in seconds, however the stages divide their time between forward and backward.

        T >= max_s (m t_s + u_s)
        T >= sum_s t_s + (m-1) t_r - sum_(s>r) (t_r - t_s) + u_0      for r = p-1 and each r with m > p-r, where v = 1

    The second bound adds up three parts: the first micro-batch on its way to the last stage and back to r; stage r at
    work without a break on all that it has not warmed up with; the last micro-batch on its way to the last stage and
    back to the first. It is close to the step if a single stage sets the pace. Arguments and errors as in `step_time`.
    """
    stages = len(stage_micro_batch_seconds)
    _check(stages, micro_batches, virtual)
    busy = [micro_batches * t + u for t, u in zip(stage_micro_batch_seconds, once_seconds, strict=True)]
    least, total, behind = max(busy), sum(stage_micro_batch_seconds), 0.0
    if virtual > 1:
        return least
    for later in range(min(stages, max(1, micro_batches - 1))):  # stages behind r
        pace = stage_micro_batch_seconds[stages - 1 - later]
        least = max(least, total + (micro_batches - 1 - later) * pace + behind + once_seconds[0])
        behind += pace
    return least


def bubble_fraction(stage_micro_batch_seconds: Sequence[Quantity], micro_batches: int, virtual: int = 1) -> Quantity:
    """Share of the p devices' time in which they wait, without the once-a-step part; in [0, 1).

    1 - m sum_s t_s / (p T); (p-1)/(mv+p-1) for stages of equal time. Arguments and errors as in `step_time`.
    """
    once = [0.0] * len(stage_micro_batch_seconds)
    time = step_time(stage_micro_batch_seconds, once, micro_batches, virtual)
    busy = micro_batches * reduce(lambda left, right: left + right, stage_micro_batch_seconds)
    return 1.0 - busy / (len(stage_micro_batch_seconds) * time)


TurnKind: TypeAlias = Literal["forward", "backward", "input_gradient", "weight_gradient"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a stage: a pass of one micro-batch (0 first), or of one slice of its sequence, through one chunk.

    A backward pass is one turn, or two if the schedule splits it: the gradient of the input, which the stage before
    waits for, and the gradient of the weights, which only the optimizer waits for.
    """

    kind: TurnKind
    micro_batch: int
    chunk: int = 0
    slice: int = 0


def order_1f1b(stage: int, stages: int, micro_batches: int) -> tuple[Turn, ...]:
    """The turns of a stage under 1F1B, with never more than `in_flight` forwards without their backward.

    p-s-1 forwards warm up, then forwards and backwards alternate, then the remaining backwards follow.
    """
    return in_turn(in_flight(stage, stages, micro_batches) - 1, micro_batches)


def in_turn(warm_up: int, micro_batches: int) -> tuple[Turn, ...]:
    """`warm_up` forwards, then forwards and backwards alternate, then the remaining backwards follow."""
    turns = [Turn("forward", index) for index in range(warm_up)]
    for index in range(micro_batches - warm_up):
        turns += [Turn("forward", warm_up + index), Turn("backward", index)]
    turns += [Turn("backward", index) for index in range(micro_batches - warm_up, micro_batches)]
    return tuple(turns)


def in_flight(stage: int, stages: int, micro_batches: int) -> int:
    """The most micro-batches whose activations stage `stage` (0 first) holds: min(m, p-s).

    Raises:
        CostModelError: fewer than one stage or micro-batch, or a stage that is out of range.
    """
    _check(stages, micro_batches)
    _check_stage(stage, stages)
    return min(micro_batches, stages - stage)


def order_interleaved_1f1b(stage: int, stages: int, virtual: int, micro_batches: int) -> tuple[Turn, ...]:
    """The turns of a stage of v chunks, as in Megatron-LM.

    The k-th forward is of chunk (k mod pv) div p and of micro-batch k mod p of the round k div pv; backwards go through
    the chunks from the last to the first. min(2 (p-s-1) + (v-1) p, m v) forwards warm up, then forwards and backwards
    alternate, then the remaining backwards follow. With one chunk it is `order_1f1b`, as in Megatron-LM.

    Raises:
        CostModelError: as `in_flight`; also where v > 1 and p does not divide m.
    """
    if virtual == 1:
        return order_1f1b(stage, stages, micro_batches)
    _check(stages, micro_batches, virtual)
    _check_stage(stage, stages)
    forwards, backwards = _in_rounds(stages, virtual, micro_batches)
    warm_up = _warm_up(stage, stages, virtual, micro_batches)
    left = len(forwards) - warm_up
    alternating = (turn for pair in zip(forwards[warm_up:], backwards[:left], strict=True) for turn in pair)
    return (*forwards[:warm_up], *alternating, *backwards[left:])


@lru_cache(maxsize=8)
def _in_rounds(stages: int, virtual: int, micro_batches: int) -> tuple[tuple[Turn, ...], tuple[Turn, ...]]:
    """The forwards of a stage under interleaved 1F1B, and its backwards, each in order. They are those of every
    stage."""
    every = [
        (rounds * stages + place, chunk)
        for rounds in range(math.ceil(micro_batches / stages))
        for chunk in range(virtual)
        for place in range(stages)
    ]
    turns = every[: micro_batches * virtual]
    forwards = tuple([Turn("forward", micro_batch, chunk) for micro_batch, chunk in turns])
    return forwards, tuple([Turn("backward", micro_batch, virtual - 1 - chunk) for micro_batch, chunk in turns])


@lru_cache(maxsize=4096)
def in_flight_of_chunks(stage: int, stages: int, virtual: int, micro_batches: int) -> tuple[int, ...]:
    """The most micro-batches whose activations a stage holds, for each of its chunks in model order.

    With one chunk it is `in_flight`, with several the maximum of each chunk in `moments_in_flight`. The chunks do not
    reach their maximum at the same moment, so their sum is an upper bound.
    """
    return tuple(np.max(moments_in_flight(stage, stages, virtual, micro_batches), axis=0).tolist())


@lru_cache(maxsize=4096)
def moments_in_flight(stage: int, stages: int, virtual: int, micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """Micro-batches of each chunk whose activations a stage holds, at every moment at which it may hold the most.

    These moments are after the forwards of the steady phase. With one chunk there is one moment, `in_flight`. With
    several, count over `order_interleaved_1f1b`: after w + i + 1 forwards and i backwards, chunk c holds f_c(w + i + 1)
    - f_(v-1-c)(i), where f_c(n) = p (n div pv) + min(p, max(0, n mod pv - c p)) of n forwards are of chunk c. This
    repeats every pv turns. After the warm-up all chunks together hold w + 1 at each of these moments, and the first
    chunks hold more and more of them until the next round.
    """
    if virtual == 1:
        return ((in_flight(stage, stages, micro_batches),),)
    _check(stages, micro_batches, virtual)
    _check_stage(stage, stages)
    cycle, total = stages * virtual, micro_batches * virtual
    warm_up = _warm_up(stage, stages, virtual, micro_batches)

    if warm_up == total:
        return ((micro_batches,) * virtual,)
    turns, starts = np.arange(min(cycle, total - warm_up)), stages * np.arange(virtual)[:, None]

    def passed(number: NDArray[np.intp]) -> NDArray[np.intp]:  # (chunks, turns)
        found: NDArray[np.intp] = stages * (number // cycle) + np.clip(number % cycle - starts, 0, stages)
        return found

    return tuple(map(tuple, (passed(warm_up + turns + 1) - passed(turns)[::-1]).T.tolist()))


def _warm_up(stage: int, stages: int, virtual: int, micro_batches: int) -> int:
    return min(2 * (stages - stage - 1) + (virtual - 1) * stages, micro_batches * virtual)


def _largest(values: Sequence[Quantity]) -> Quantity:
    if any(isinstance(value, np.ndarray) for value in values):
        return reduce(np.maximum, values)
    return max(values)


def _check(stages: int, micro_batches: int, virtual: int = 1) -> None:
    if stages < 1 or micro_batches < 1:
        raise CostModelError(f"a pipeline needs stages >= 1 and micro_batches >= 1, got {stages} and {micro_batches}")
    if virtual < 1:
        raise CostModelError(f"a stage needs virtual >= 1 chunks, got {virtual}")
    if virtual > 1 and micro_batches % stages:
        raise CostModelError(
            f"{virtual} chunks a stage take micro-batches in rounds of {stages} stages, which do not divide"
            f" {micro_batches} micro-batches"
        )


def _check_stage(stage: int, stages: int) -> None:
    if not 0 <= stage < stages:
        raise CostModelError(f"stage {stage} is not one of 0..{stages - 1}")
