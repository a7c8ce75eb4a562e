"""Seconds of the passes and communications of each pipeline rank: the input of `costmodels.pipelines.timeline`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from costmodels.errors import CostModelError
from costmodels.pipelines.orders import Orders
from costmodels.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSeconds:
    """One pass of a micro-batch, or of a slice of it, through a chunk.

    `blocking` is communication inside the pass that computation waits for. `overlapped` is communication that only has
    to end when the pass ends.
    """

    computation: Seconds
    blocking: Seconds = 0.0
    overlapped: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSeconds:
    """Time and memory of one chunk of one rank.

    Attributes:
        forward: one entry per slice of the sequence (a single one if it is whole).
        backward: as `forward`; the gradient of the input alone if `weight_gradient` is given.
        weight_gradient: as `forward`, or empty. A schedule that does not split the backward pass does both in one turn.
        gather: all-gather of the weights before each pass, except that of the weight gradient.
        reductions: one for each bucket of gradients, in the order in which the backward pass fills them; each bucket
            takes an equal share of its time.
        reduce_each: reductions run in each backward pass (gradients that are stored sharded), not once a step.
        send_forward: transfer of the output to the next chunk.
        send_backward: transfer of the gradient to the previous chunk.
        held: bytes that one slice of a micro-batch keeps from its forward until its backward pass, or until its weight
            gradient if that is a turn of its own.
    """

    forward: tuple[PassSeconds, ...]
    backward: tuple[PassSeconds, ...]
    weight_gradient: tuple[PassSeconds, ...] = ()
    gather: Seconds = 0.0
    reductions: tuple[Seconds, ...] = ()
    reduce_each: bool = False
    send_forward: Seconds = 0.0
    send_backward: Seconds = 0.0
    held: Bytes = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeconds:
    """One rank: its chunks in model order (chunk c of rank r is c p + r of the model), and the end of its step.

    `paired` has an entry for each chunk where turns run together (`costmodels.paired_turns`), else it is empty: the
    seconds that its forward turn and the backward turn of the other chunk save together. `optimizer` and
    `weight_gather` are seconds at the end of the step.
    """

    chunks: tuple[ChunkSeconds, ...]
    paired: tuple[Seconds, ...] = ()
    optimizer: Seconds = 0.0
    weight_gather: Seconds = 0.0


def check_times(ranks: Sequence[RankSeconds], orders: Orders) -> None:
    """Check that ranks, orders, chunks and slices match, and that all seconds and bytes are finite and not negative.

    Raises:
        CostModelError: they do not.
    """
    if not ranks or len(ranks) != len(orders):
        raise CostModelError(
            f"a pipeline needs an order for each rank, got {len(ranks)} ranks and {len(orders)} orders"
        )
    chunks = len(ranks[0].chunks)
    if not chunks or not ranks[0].chunks[0].forward:
        raise CostModelError("a rank needs at least one chunk, and a chunk at least one slice")
    slices = len(ranks[0].chunks[0].forward)
    for number, rank in enumerate(ranks):
        if len(rank.chunks) != chunks:
            raise CostModelError(f"rank {number} has {len(rank.chunks)} chunks, rank 0 has {chunks}")
        for chunk in rank.chunks:
            sizes = (len(chunk.forward), len(chunk.backward), len(chunk.weight_gradient) or slices)
            if sizes != (slices, slices, slices):
                raise CostModelError(f"rank {number} has passes for {sizes} slices, rank 0 for {slices}")
        amounts = [rank.optimizer, rank.weight_gather, *rank.paired]
        for chunk in rank.chunks:
            amounts += [chunk.gather, *chunk.reductions, chunk.send_forward, chunk.send_backward, chunk.held]
            for one in (*chunk.forward, *chunk.backward, *chunk.weight_gradient):
                amounts += [one.computation, one.blocking, one.overlapped]
        wrong = [amount for amount in amounts if not 0 <= amount < math.inf]
        if wrong:
            raise CostModelError(
                f"rank {number} has a duration or size of {wrong[0]}: it must be finite and not negative"
            )
