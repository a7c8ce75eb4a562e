"""The 1F1B pipeline schedule with a flush at the end of the step (PipeDream-flush).

    stage 0   F F F F     B F B F B B B          stage s warms up with p-s forwards, then alternates,
    stage 1     F F F   B F B F B B  B           so it holds min(m, p-s) micro-batches of activations
    stage 2       F F B F B F B B                m micro-batches, p stages
    stage 3         F B F B F B F B

Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021,
section 2.2 and figure 4. Not good for: interleaved stages and sends that do not overlap, which need a simulation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import numpy as np

from costmodels.errors import CostModelError
from costmodels.units import Quantity


def step_time(
    stage_micro_batch_seconds: Sequence[Quantity], once_seconds: Sequence[Quantity], micro_batches: int
) -> Quantity:
    """Seconds of one step; element-wise where the stages give arrays.

        T = sum_s t_s + (m-1) max_s t_s + max_s u_s

    The first micro-batch passes all stages forward and backward, the slowest stage then sets the pace of the others,
    and what a stage does once a step comes after its last backward. Exact for stages of equal time; otherwise the work
    that a faster stage could hide under the slowest one is not counted as hidden.

    Args:
        stage_micro_batch_seconds: t_s, forward and backward of one micro-batch, with the transfers it waits for.
        once_seconds: u_s, what stage s does once per step (gradient reduction, optimizer).
        micro_batches: m >= 1.
    """
    _check(len(stage_micro_batch_seconds), micro_batches)
    if len(once_seconds) != len(stage_micro_batch_seconds):
        raise CostModelError(
            f"{len(stage_micro_batch_seconds)} stages, but once_seconds has {len(once_seconds)} entries"
        )
    total = reduce(lambda left, right: left + right, stage_micro_batch_seconds)
    return total + (micro_batches - 1) * _largest(stage_micro_batch_seconds) + _largest(once_seconds)


def bubble_fraction(stage_micro_batch_seconds: Sequence[Quantity], micro_batches: int) -> Quantity:
    """Share of the p devices' time, without the once-a-step part, in which they wait; in [0, 1).

    1 - m sum_s t_s / (p T),    (p-1)/(m+p-1) for stages of equal time
    """
    once = [0.0] * len(stage_micro_batch_seconds)
    time = step_time(stage_micro_batch_seconds, once, micro_batches)
    busy = micro_batches * reduce(lambda left, right: left + right, stage_micro_batch_seconds)
    return 1.0 - busy / (len(stage_micro_batch_seconds) * time)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a stage: the forward or the backward pass of one micro-batch (0 first)."""

    kind: Literal["forward", "backward"]
    micro_batch: int


def order_1f1b(stage: int, stages: int, micro_batches: int) -> tuple[Turn, ...]:
    """What a stage does in which order: p-s-1 forwards to warm up, then one forward and one backward in turn, then the
    backwards that are left. Never more than `in_flight` forwards without their backward."""
    warm_up = in_flight(stage, stages, micro_batches) - 1
    turns = [Turn("forward", index) for index in range(warm_up)]
    for index in range(micro_batches - warm_up):
        turns += [Turn("forward", warm_up + index), Turn("backward", index)]
    turns += [Turn("backward", index) for index in range(micro_batches - warm_up, micro_batches)]
    return tuple(turns)


def in_flight(stage: int, stages: int, micro_batches: int) -> int:
    """Micro-batches whose activations stage `stage` (0 first) holds at most: min(m, p-s)."""
    _check(stages, micro_batches)
    if not 0 <= stage < stages:
        raise CostModelError(f"stage {stage} is not one of 0..{stages - 1}")
    return min(micro_batches, stages - stage)


def _largest(values: Sequence[Quantity]) -> Quantity:
    if any(isinstance(value, np.ndarray) for value in values):
        return reduce(np.maximum, values)
    return max(values)


def _check(stages: int, micro_batches: int) -> None:
    if stages < 1 or micro_batches < 1:
        raise CostModelError(f"a pipeline needs stages >= 1 and micro_batches >= 1, got {stages} and {micro_batches}")
