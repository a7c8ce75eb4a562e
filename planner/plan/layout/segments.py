"""The segments of a stage: what each run of operators recomputes, gathers, offloads, reads and writes.

    before | block 0 | block 1 | ... | after     a block is a segment by itself where it is recomputed or offloads what
                                                 it saves, and everywhere if the plan offloads weights or gathers the
                                                 weights of a block together; else it is part of a longer segment

Segments are derived here only: the prediction, the memory account, the audit and the executor read them. A memory
feature is one more field."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from hardware_profiles import Home
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.activation_offload import offloaded_activations
from planner.plan.layout.block_gathers import BlockGather, Known, block_gathers
from planner.plan.layout.expert_overlap import expert_overlaps_of, in_parts_order, replay_of, replayed
from planner.plan.layout.overlapped_products import Overlap, in_order, overlaps_of
from planner.plan.layout.stage_cut import StageCut, cut_stage
from planner.plan.layout.weight_offload import offloaded_weights, offloads_weights
from planner.pricing.liveness import replays


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive operators of a stage, which run as one.

    Attributes:
        operators: their places in the graph, in the order in which they run.
        block: the block that they are; None for several blocks, and outside of the blocks.
        recomputed: whether they run again in the backward pass.
        again: the backward pass needs only this many of them, from the first on, to run again; 0 where none do.
        reads: values that other segments make, in the order in which they are read.
        held: parameters and buffers, likewise.
        writes: values that later operators read, and results of the stage.
        home: offload target of activations between the two passes. A recomputed segment offloads those of `reads` that
            are in `offloads`; another segment what autograd saves, without its inputs and outputs.
        offloads: see `home`.
        weights: offloaded weights that come to the device for each pass.
        gathers: weights that are gathered together when it begins, and whose gradients are reduced together.
    """

    operators: tuple[int, ...]
    block: int | None
    recomputed: bool
    again: int
    reads: tuple[str, ...]
    held: tuple[str, ...]
    writes: tuple[str, ...]
    home: Home
    offloads: tuple[str, ...]
    weights: tuple[str, ...]
    gathers: tuple[BlockGather, ...]

    @property
    def offloads_activations(self) -> bool:
        """Whether any activations leave the device."""
        return self.home != "device" and (bool(self.offloads) or not self.recomputed)

    @property
    def home_of_saved(self) -> Home:
        """Where saved tensors are between the passes; a recomputed segment saves nothing."""
        return "device" if self.recomputed else self.home

    @property
    def gathered(self) -> frozenset[str]:
        """The weights that are gathered together."""
        return frozenset(name for one in self.gathers for name in one.names)


def segments_of(
    bound: BoundPlan,
    cut: StageCut,
    known: Known | None = None,
    outputs: Collection[str] = (),
    overlaps: Sequence[Overlap] | None = None,
) -> tuple[Segment, ...]:
    """The segments of a stage, in order. `known` has gathers found for other stages; `outputs` are values
    that others want of the stage; `overlaps` those of the whole plan, where they are known."""
    known = {} if known is None else known
    results, again = {*_results(bound, cut), *outputs}, replays(bound.graph, bound.blocks)
    used_later, found = set(results), list[Segment]()
    overlaps = overlaps_of(bound, cut.operators) if overlaps is None else overlaps
    behind = _behind(bound, overlaps)
    experts = expert_overlaps_of(bound, overlaps, cut.operators)
    changed = replayed(bound, experts, overlaps)

    def moves(at: int, block: int | None) -> bool:
        assert block is not None, "blocks are recomputed"
        place, replay = replay_of(bound, at, block, again, changed)
        return place < replay.moves

    for block, run in reversed(_runs(bound, cut.operators)):
        operators = in_parts_order(in_order(run, behind), experts)
        recomputed = bound.recompute_of(block) is not None
        mentioned = _mentioned(bound, operators)
        made = {name for at in operators for name in bound.graph.operators[at].results if name is not None}
        held = tuple(name for name in mentioned if name in bound.parameters or name in bound.graph.buffers)
        found.append(
            Segment(
                operators=operators,
                block=block,
                recomputed=recomputed,
                again=sum(moves(at, block) for at in operators) if recomputed else 0,
                reads=tuple(name for name in mentioned if name not in made and name not in held),
                held=held,
                writes=tuple(sorted(made & used_later)),
                home="device" if block is None else bound.offloaded_blocks.get(block, "device"),
                offloads=offloaded_activations(bound, block),
                weights=offloaded_weights(bound, operators),
                gathers=block_gathers(bound, operators, known),
            )
        )
        used_later.update(mentioned)
    return tuple(reversed(found))


def _behind(bound: BoundPlan, overlaps: Sequence[Overlap]) -> Mapping[int, Sequence[int]]:
    """Products that run right behind the operator of their overlap, collected stage by stage."""
    found, _ = bound.once(
        ("behind", id(overlaps)), lambda: ({one.at: one.early for one in overlaps if one.early}, overlaps)
    )
    return found


def segments_by_stage(bound: BoundPlan, overlaps: Sequence[Overlap] | None = None) -> tuple[tuple[Segment, ...], ...]:
    """The segments of every stage of a plan; `overlaps` are its overlaps, where they are known."""
    plan, training = bound.plan, bound.plan.training
    own = (training.update, training.tensor_overlap, training.expert_overlap, training.interleave)
    return bound.once(("segments", plan.stages, plan.schedule, own), lambda: _by_stage(bound, overlaps))


def gathers_nothing(bound: BoundPlan) -> bool:
    """Whether no stage of a plan gathers weights together."""
    return not any(segment.gathers for stage in segments_by_stage(bound) for segment in stage)


def _by_stage(bound: BoundPlan, overlaps: Sequence[Overlap] | None) -> tuple[tuple[Segment, ...], ...]:
    known: Known = {}
    overlaps = overlaps_of(bound) if overlaps is None else overlaps
    return tuple(
        segments_of(bound, cut_stage(bound, stage), known, overlaps=overlaps) for stage in range(len(bound.plan.stages))
    )


def _runs(bound: BoundPlan, operators: Sequence[int]) -> list[tuple[int | None, tuple[int, ...]]]:
    """Blocks that are segments by themselves, and None with the operators between them."""
    apart = offloads_weights(bound) or bound.plan.training.update.by_block

    numbers = bound.blocks.numbers
    alone = {
        block
        for block in range(bound.blocks.count)
        if apart or block in bound.offloaded_blocks or bound.recompute_of(block) is not None
    }

    own = [block if (block := numbers.get(at)) in alone else None for at in operators]
    placed = groupby(zip(own, operators, strict=True), key=itemgetter(0))
    return [(block, tuple([at for _, at in run])) for block, run in placed]


def _results(bound: BoundPlan, cut: StageCut) -> Collection[str]:
    """Values that outlive a stage: those that it hands on, the loss, the new contents of buffers."""
    graph, own = bound.graph, set(cut.operators)
    renewed = (content for _, content in graph.updates if graph.producer[content] in own)
    return {*cut.sends, *((graph.loss,) if cut.last else ()), *renewed}


def _mentioned(bound: BoundPlan, operators: Iterable[int]) -> tuple[str, ...]:
    """All operands, in the order of their first mention."""
    every = bound.graph.operators
    return tuple(dict.fromkeys([name for at in operators for name in every[at].operands]))
