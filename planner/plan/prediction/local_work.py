"""FLOPs of one rank for a micro-batch, by operator and phase: the work that a plan is charged for, without seconds.

Only products count: of matrices, of attention, and of convolutions. The field counts these, and they identify the
kernels of an audit. Element-wise operators are charged for the memory that they move.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hardware_profiles import Flops
from planner.plan.binding.bind import BoundOperator, BoundPlan, stage_of_operators
from planner.plan.binding.slices import work_of_slices
from planner.plan.layout.expert_overlap import expert_overlaps_of, replay_of, replayed
from planner.plan.layout.matrix_groups import matrix_groups
from planner.plan.layout.micro_batch_turns import PRODUCTS
from planner.plan.layout.overlapped_products import overlaps_of
from planner.plan.layout.stage_cut import cut_stage
from planner.plan.prediction.charges import Phase
from planner.pricing.inner_messages import joined_bytes
from planner.pricing.liveness import replays
from planner.pricing.matrix_update import stack_flops
from planner.pricing.operator_price import uneven
from planner.sharding.rule import loop_extents, ring_axis
from planner.sharding.window import Window, computed_pairs
from planner.sharding.zigzag import pieces_of_ring

Work = Mapping[tuple[Phase, str], Flops]
"""By phase and operator; operators that are missing compute nothing."""


def local_work(bound: BoundPlan, rank: int) -> Work:
    """The FLOPs of a device in the middle of a pipeline rank for one micro-batch: each product with its share of the
    loops."""
    graph, blocks = bound.graph, bound.blocks
    found: defaultdict[tuple[Phase, str], Flops] = defaultdict(float)
    stages = stage_of_operators(bound)
    again = replays(graph, blocks)
    overlaps = overlaps_of(bound)
    changed = replayed(bound, expert_overlaps_of(bound, overlaps), overlaps)
    runs = {product: one.at for one in overlaps for product in one.products}
    for at, op in enumerate(bound.operators):
        if bound.plan.rank_of(stages[at]) != rank or op.rule.op_class not in PRODUCTS:
            continue
        name, forward = bound.operators[runs.get(at, at)].operator.name, _forward(op, bound)
        graded = graph.graded_places(op.operator)
        found["forward", name] += forward
        found["backward", name] += _backward(op, bound, graded, forward)
        block = blocks.block_of(at)
        if block is None or bound.recompute_of(block) is None or bound.is_kept(at):
            continue
        place, replay = replay_of(bound, at, block, again, changed)
        if replay.runs(place, joined_bytes(op.rule, op.strategy, bound.plan.mesh)):
            found["recomputation", name] += forward
        elif place < replay.moves:  # only the last of interleaved micro-batches stops at its operands
            interleave = bound.plan.training.interleave
            found["recomputation", name] += forward * (interleave - 1) / interleave
    return {key: flops for key, flops in found.items() if flops}


def update_work(bound: BoundPlan, rank: int) -> Flops:
    """The FLOPs of products of the same device once a step, to update matrices."""
    mesh, stages = bound.plan.mesh, bound.plan.stages_of(rank)
    held = {name for stage in stages for name in cut_stage(bound, stage).parameters}
    groups = matrix_groups(bound, held, mesh.coordinate(mesh.size // 2))
    return math.fsum(stack_flops(group.stack, mesh.sizes) for group in groups)


def _forward(op: BoundOperator, bound: BoundPlan) -> Flops:
    mesh = bound.plan.mesh
    extents = loop_extents(op.rule, op.strategy, mesh)
    axis = ring_axis(op.rule, op.strategy, mesh.sizes)
    share = 1.0 if axis is None else uneven(op.rule, op.strategy, mesh, mesh.coordinate(mesh.size // 2)[axis])
    if op.rule.window is not None:
        share = _in_blocks(op, op.rule.window, bound, extents)
    elif bound.plan.slices > 1 and op.rule.op_class == "attention":
        share *= work_of_slices(op.rule, bound.plan.slices)
    work = op.rule.flops_of(extents)
    return float(round(share * work)) if op.rule.exchanged else share * work


def _backward(op: BoundOperator, bound: BoundPlan, graded: Sequence[int], forward: Flops) -> Flops:
    """Repeated terms are counted by themselves, as the kernels are: a share of all work would be rounded."""
    rule = op.rule
    if not rule.repeated_terms:
        return forward * rule.backward_work(graded)
    own = forward * rule.backward_work(graded, repeated=False)
    again = replace(op, rule=replace(rule, work=tuple(rule.work[term] for term in rule.repeated_terms)))
    return own + (_forward(again, bound) if own else 0.0)


def _in_blocks(op: BoundOperator, window: Window, bound: BoundPlan, extents: Sequence[float]) -> float:
    """Pairs of queries and keys that a device computes under a window, on average over its slices, relative to the
    pairs that its share of the window has."""
    mesh, slices, names = bound.plan.mesh, bound.plan.slices, op.rule.index
    axis = ring_axis(op.rule, op.strategy, mesh.sizes)
    length = op.rule.factors[names["k"]].extent
    width = round(math.prod(extents[names[name]] for name in ("b", "g", "r") if name in names))
    size = 1 if axis is None else mesh.sizes[axis]
    if axis is not None:
        zigzag, place = axis in mesh.zigzag, mesh.coordinate(mesh.size // 2)[axis]
        turns = [pieces_of_ring(length, size, owner, zigzag) for owner in range(size)]
        pairs = computed_pairs(window, turns[place], turns, width)
    else:
        pairs = sum(
            computed_pairs(window, ((at * length, length),), (((at * length, length),), ((0, at * length),)), width)
            for at in range(slices)
        )
    return pairs * size / slices / window.pairs(0, length, length)
