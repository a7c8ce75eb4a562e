"""Checks of the turns of one rank: each slice goes once through each chunk in each direction, in an order that the
rank's own results allow. Orders of several ranks that wait for each other are found by the simulation."""

from collections.abc import Sequence
from typing import NamedTuple

from costmodels.errors import CostModelError
from costmodels.pipelines.schedules import Turn


class Shape(NamedTuple):
    """Ranks of a pipeline, chunks on each, micro-batches of a step, slices of each, and whether the chunks lie in a
    V."""

    ranks: int
    virtual: int
    micro_batches: int
    slices: int
    v_shaped: bool = False


def check_order(rank: int, order: Sequence[Turn], shape: Shape, *, trains: bool = True) -> None:
    """Check that every slice goes once through every chunk, forward before backward, slices in order forward and back.

    A step that does not train (`trains` false) may also have forward turns alone.

    Raises:
        CostModelError: a turn that is missing, repeated, out of range, or before one that it needs.
    """
    turns = set(order)
    if len(turns) != len(order):
        twice = next(turn for index, turn in enumerate(order) if turn in order[:index])
        raise CostModelError(f"rank {rank} takes {words(twice)} twice")
    split = any(turn.kind == "input_gradient" for turn in order)
    alone = not trains and all(turn.kind == "forward" for turn in order)
    kinds = 3 if split else 1 if alone else 2
    seen: set[Turn] = set()
    for turn in order:
        inside = turn.chunk < shape.virtual and turn.micro_batch < shape.micro_batches and turn.slice < shape.slices
        if not inside or min(turn.chunk, turn.micro_batch, turn.slice) < 0 or (split and turn.kind == "backward"):
            raise CostModelError(
                f"rank {rank} takes {words(turn)}, which is none of {shape.virtual} chunks, {shape.micro_batches}"
                f" micro-batches and {shape.slices} slices{', backwards in two parts' if split else ''}"
            )
        for need in _local_needs(turn, shape.slices):
            if need not in seen:
                raise CostModelError(f"rank {rank} takes {words(turn)} before {words(need)}")
        seen.add(turn)
    total = kinds * shape.virtual * shape.micro_batches * shape.slices
    if len(order) != total:
        raise CostModelError(
            f"rank {rank} takes {len(order)} turns; {shape.virtual} chunks, {shape.micro_batches} micro-batches and"
            f" {shape.slices} slices need {total}"
        )


def _local_needs(turn: Turn, slices: int) -> list[Turn]:
    """Turns of the same rank and chunk that must come before this one."""
    batch, chunk, piece = turn.micro_batch, turn.chunk, turn.slice
    if turn.kind == "forward":
        return [Turn("forward", batch, chunk, piece - 1)] if piece else []
    if turn.kind == "weight_gradient":
        return [Turn("input_gradient", batch, chunk, piece)]
    needs = [Turn("forward", batch, chunk, piece)]
    return needs if piece == slices - 1 else [*needs, Turn(turn.kind, batch, chunk, piece + 1)]


def words(turn: Turn) -> str:
    """A turn in words, for messages."""
    piece = f", slice {turn.slice}" if turn.slice else ""
    return f"{turn.kind} of micro-batch {turn.micro_batch}, chunk {turn.chunk}{piece}"
