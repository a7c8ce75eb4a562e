"""The operators of a stage in sections: blocks that are recomputed, or offload their weights, by themselves, and what
lies between them.

    before | block 0 | block 1 | ... | after     with what flows into it, what it makes for others, what it offloads
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hardware_profiles import Home
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.activation_offload import offloaded_activations
from planner.plan.layout.saved_tensor_offload import home_of_saved
from planner.plan.layout.stage_cut import runs_of
from planner.plan.layout.weight_offload import offloaded_weights
from planner.pricing.liveness import replays
from runtime.executor.block_gathers import Bundle, bundles_of
from runtime.executor.instruction import Instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Consecutive instructions. `recomputed` ones run under a checkpoint, from the values `reads` to the values
    `writes`; the first `again` of them are all that the backward pass needs anything of. What of the `reads` it
    `offloads` has a `home` outside of the device until then; others `offload` what autograd saves of them, beside what
    they read and write. The weights that `visit` are on the device while it runs, `bundles` are gathered together when
    it begins."""

    instructions: tuple[Instruction, ...]
    recomputed: bool = False
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    again: int = 0
    offloads: tuple[str, ...] = ()
    visit: tuple[str, ...] = ()
    bundles: tuple[Bundle, ...] = ()
    home: Home = "device"

    @property
    def offloading(self) -> bool:
        """Whether it offloads any activations."""
        return self.home != "device" and (bool(self.offloads) or not self.recomputed)


def sections_of(
    bound: BoundPlan, instructions: Mapping[int, Instruction], results: Sequence[str]
) -> tuple[Section, ...]:
    """A stage in sections; `results` are the values that outlive it."""
    return tuple(
        _recomputed_section(bound, instructions, run, results)
        if recomputed
        else Section(
            instructions=tuple(instructions[at] for at in run),
            reads=_reads(instructions, run),
            writes=_writes(bound, instructions, run, results),
            visit=offloaded_weights(bound, run),
            bundles=bundles_of(bound, run),
            home=home_of_saved(bound, bound.blocks.block_of(run[0])),
        )
        for recomputed, run in runs_of(bound, tuple(instructions))
    )


def _recomputed_section(
    bound: BoundPlan, instructions: Mapping[int, Instruction], run: Sequence[int], results: Sequence[str]
) -> Section:
    graph = bound.graph
    inside = [instructions[at] for at in run]
    held = graph.parameter_names | set(graph.buffers)
    reads = tuple(name for name in _reads(instructions, run) if name not in held)
    block = bound.blocks.block_of(run[0])
    assert block is not None, "blocks are recomputed"
    again = replays(graph, bound.blocks)[bound.blocks.kinds[block]].moves
    return Section(
        instructions=tuple(inside),
        recomputed=True,
        reads=reads,
        writes=_writes(bound, instructions, run, results),
        again=again,
        offloads=offloaded_activations(bound, block),
        visit=offloaded_weights(bound, run),
        bundles=bundles_of(bound, run),
        home=bound.offloaded_blocks.get(block, "device"),
    )


def _reads(instructions: Mapping[int, Instruction], run: Sequence[int]) -> tuple[str, ...]:
    """What a run reads that it does not make, weights and buffers too."""
    inside = [instructions[at] for at in run]
    made = {promise[0] for instruction in inside for promise in instruction.results if promise is not None}
    return _ordered(o.name for i in inside for o in i.operands if o.name not in made)


def _writes(
    bound: BoundPlan, instructions: Mapping[int, Instruction], run: Sequence[int], results: Sequence[str]
) -> tuple[str, ...]:
    """What a run makes that is read after it, or is a result of the stage."""
    made = {promise[0] for at in run for promise in instructions[at].results if promise is not None}
    later = {name for at in instructions if at > run[-1] for name in bound.graph.operators[at].operands}
    return tuple(name for name in sorted(made) if name in results or name in later)


def _ordered(names: Iterable[str]) -> tuple[str, ...]:
    """Each name once, in the order of first mention."""
    return tuple(dict.fromkeys(names))
