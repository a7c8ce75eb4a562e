"""The segments of a stage (`planner.plan.layout.segments`) as programs: each with its instructions, and the weights
that it gathers together."""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.plan.layout.segments import Segment
from runtime.executor.block_gathers import Bundle, bundle_of
from runtime.executor.instruction import Instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Consecutive instructions. Recomputed ones run under a checkpoint, from the values that the segment reads to those
    that it writes; the first `again` of them are all that its backward pass needs anything of. Its offloaded weights
    are on the device while it runs, `bundles` are gathered when it begins."""

    segment: Segment
    instructions: tuple[Instruction, ...]
    again: int
    bundles: tuple[Bundle, ...]


def section_of(segment: Segment, instructions: Mapping[int, Instruction]) -> Section:
    """A segment with the instructions of its operators; those without one are run by another."""
    return Section(
        segment=segment,
        instructions=tuple(instructions[at] for at in segment.operators if at in instructions),
        again=sum(at in instructions for at in segment.operators[: segment.again]),
        bundles=tuple(bundle_of(one) for one in segment.gathers),
    )
