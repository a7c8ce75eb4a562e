"""The segments of a stage (`planner.plan.layout.segments`) as programs: instructions, and the weights that they
gather."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.plan.layout.segments import Segment
from runtime.executor.block_gathers import Bundle, bundle_of
from runtime.executor.instruction import Instruction
from runtime.ops.fp8.fp8_scales import Fp8Scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Consecutive instructions. Recomputed ones run under a checkpoint, from the values that the segment reads to those
    that it writes; its backward pass needs only the first `again` of them. Its offloaded weights are on the device
    while it runs; `bundles` are gathered when it begins."""

    segment: Segment
    instructions: tuple[Instruction, ...]
    again: int
    bundles: tuple[Bundle, ...]


def section_of(
    segment: Segment,
    instructions: Mapping[int, Instruction],
    behind: Mapping[int, Sequence[Instruction]],
    scales: Fp8Scales | None = None,
) -> Section:
    """A segment with the instructions of its operators, and those that follow `behind` an operator; operators without
    an instruction run inside of another one. Layers in fp8 may have `scales` that are known in advance."""

    def of(operators: Sequence[int]) -> tuple[Instruction, ...]:
        return tuple(one for at in operators if at in instructions for one in (instructions[at], *behind.get(at, ())))

    return Section(
        segment=segment,
        instructions=of(segment.operators),
        again=len(of(segment.operators[: segment.again])),
        bundles=tuple(bundle_of(one, scales) for one in segment.gathers),
    )
