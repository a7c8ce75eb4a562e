"""The cost of a bound plan, computed operator by operator over the whole graph.

The search fills tables for one block and multiplies. Here nothing is tabulated or shared between stages. A block is
skipped only if all of it was compared with an earlier one, whose numbers are then added again
(`planner.plan.prediction.walk.repeated_blocks`). So an error in the search shows as a difference between the two. Both
use the prices of `planner.pricing`.

    rank r:   t_r  seconds of one micro-batch, forward and backward, with exposed transfers
              u_r  seconds once a step: optimizer, weights, and gradient reduction that no last backward pass covers
    step   =  by the schedule, from these (see planner.plan.prediction.step)
    objective  =  m max t_r + (sum t_r - max t_r) / v + max u_r     (1F1B of v virtual stages: costmodels.pipelines)
    memory =  weights + gradients + states + in_flight * kept activations + largest transient, then allocator slack;
              transient is that of operators, and of redistributions (planner.plan.prediction.memory.moving)

A pipeline rank holds v stages of the model (v = 1: one stage); `planner.plan.prediction.walk.walk` sums it up.

In the objective everything waits, one operator after the other, except for communication of weights, of tensor
parallelism and of experts that overlaps with work. For plans with a pipeline, the search proves gaps of the objective
(`planner.strategy_search.finalists.proofs.bounded_seconds`). Both objective and step charge the share of communication
that software does not overlap; the step also checks whether there is enough work to overlap the rest.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from costmodels import peak_memory, step_time
from hardware_profiles import HOMES, Bytes, Cluster, Machine, Seconds, clusters_of_ranks, parts_of, spread_of
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.segments import segments_by_stage
from planner.plan.plan import SLACK, Plan, Prediction, StagePrediction
from planner.plan.prediction.memory.moving import hold, most_moving, receive_buffers
from planner.plan.prediction.step import (
    AHEAD,
    BESIDE,
    BETWEEN_STAGES,
    COVERED,
    GATHERED_AHEAD,
    PIPELINE_BUBBLE,
    REDUCED_AHEAD,
    UNCOVERED,
    UNDER_EXCHANGE,
    UNDER_PRODUCTS,
    bucketed,
    covered_reductions,
    step_of,
)
from planner.plan.prediction.walk.repeated_blocks import block_keys, repeated_blocks
from planner.plan.prediction.walk.stage_cost import StageCost
from planner.plan.prediction.walk.walk import hides, walks_of
from planner.plan.schedule import runs_in_pairs


def predict(bound: BoundPlan, cluster: Machine) -> Prediction:
    """Step time and peak memory of a plan, in parts that sum to the whole. Every pipeline rank is priced for its own
    devices; the fullest rank is the one that uses the largest share of its memory."""
    (found,) = predict_alike([bound], cluster)
    assert found is not None
    return found


def predict_alike(
    bounds: Sequence[BoundPlan], cluster: Machine, limits: Sequence[Bytes] | None = None
) -> list[Prediction | None]:
    """`predict` for plans that differ in their schedule only: prices of operators and collectives are computed once.
    None for a plan in which a rank needs more than its `limits`, in bytes."""
    found, walks = list[Prediction | None](), walks_of(bounds[0], cluster)
    clusters, apart = clusters_of_ranks(cluster, len(walks)), tuple({id(walk): walk for walk in walks}.values())
    limits = (math.inf,) * len(walks) if limits is None else limits
    moving = most_moving(bounds[0], repeated_blocks(block_keys(bounds[0], walks[0].alive)), walks[0].overlapped)
    for bound in bounds:
        received = receive_buffers(bound)
        of_walks = {id(walk): block_keys(bound, walk.alive) for walk in apart}
        if bound is not bounds[0]:  # the walks began with that one
            # which gradients are deferred, and so stay out of coalesced reductions, depends on the schedule only
            stages = segments_by_stage(bound) if bound.plan.training.update.by_block else apart[0].stages
            for walk in apart:
                walk.begin(bound, stages)
        costs, fits = list[StageCost](), True
        for rank, walk in enumerate(walks):
            costs.append(walk.rank(rank, keys=of_walks[id(walk)]))
            hold(costs[-1], moving[rank], received[rank], bound.plan, clusters[rank])
            fits = stage_peak(costs[-1], clusters[rank]) <= limits[rank]
            if not fits:
                break
        if not fits:
            found.append(None)
            continue
        experts = "experts" in [operator.rule.op_class for operator in bound.operators]
        flops = sum(walk.flops for walk in apart)
        found.append(_assemble(bound.plan, flops, costs, cluster, experts=experts))
    return found


def interleaved_seconds(bound: BoundPlan, cluster: Machine, numbers: Sequence[int]) -> list[Seconds]:
    """Seconds of a step of a plan that interleaves micro-batches, for each number of them. The number decides how much
    communication overlaps and how much memory is held, not what a micro-batch computes or sends."""
    costs, plan = stage_costs(bound, cluster), bound.plan
    found = []
    for number in numbers:
        chunks = [[replace(chunk, interleave=number) for chunk in cost.chunks] for cost in costs]
        found.append(
            step_of(chunks, [cost.all_once for cost in costs], plan.training.micro_batches, plan.schedule).seconds
        )
    return found


def stage_peak(cost: StageCost, cluster: Cluster) -> Bytes:
    """The peak memory of a rank, with the share of the allocator and of libraries."""
    return float(peak_memory(sum(cost.memory.values()), 0.0, 0.0, cluster.device, cluster.software))


def stage_costs(bound: BoundPlan, cluster: Machine) -> tuple[StageCost, ...]:
    """The sums of every pipeline rank."""
    return tuple(walk.rank(rank) for rank, walk in enumerate(walks_of(bound, cluster)))


def stated_costs(bound: BoundPlan, cluster: Machine) -> tuple[StageCost, ...]:
    """The same as a plan states them: with the memory of redistributions in progress, and of receives posted ahead,
    which searches do not count."""
    costs, moving, received = stage_costs(bound, cluster), most_moving(bound), receive_buffers(bound)
    for rank, own in enumerate(clusters_of_ranks(cluster, len(costs))):
        hold(costs[rank], moving[rank], received[rank], bound.plan, own)
    return costs


def _assemble(
    plan: Plan, flops_per_part: float, costs: list[StageCost], cluster: Machine, *, experts: bool
) -> Prediction:
    m = plan.stage_passes
    virtual = 1 if plan.schedule_kind.v_shaped else plan.virtual_stages  # stages that take turns in rounds
    per_part = [_part_seconds(cost) for cost in costs]
    per_step = [
        sum(cost.once.values()) - _covered(cost) + sum(one.longer for chunk in cost.chunks for one in chunk.passes)
        for cost in costs
    ]
    step = step_of([cost.chunks for cost in costs], [cost.all_once for cost in costs], m // plan.slices, plan.schedule)
    busiest = costs[step.busiest]
    time = [(name, m * seconds) for name, seconds in busiest.all_micro_batch.items()]
    time += [(PIPELINE_BUBBLE, step.bubble), *busiest.all_once.items()]
    passes = [one for chunk in busiest.chunks for one in chunk.passes]
    under = [(BESIDE, m * sum(one.beside for one in passes)), (GATHERED_AHEAD, m * sum(one.gathered for one in passes))]
    under = [(name, seconds) for name, seconds in under if seconds]
    time += [(name, -seconds) for name, seconds in under]
    transfers = m * sum(one.transfers for one in passes)
    if busiest.chunks[0].receives_ahead and transfers:
        time.append((BETWEEN_STAGES, -transfers))
    products = m * sum(one.under_products for one in passes)
    if products:
        time.append((UNDER_PRODUCTS, -products))
    exchanged = m * sum(one.exchanged for one in passes)
    if exchanged:
        time.append((UNDER_EXCHANGE, -exchanged))
    buckets = bucketed(busiest.chunks)
    if buckets:
        time.append((REDUCED_AHEAD, -buckets))
    if hides(cluster) or under or exchanged or buckets:
        time.append((UNCOVERED, step.uncovered))
    if plan.training.interleave > 1 or runs_in_pairs(plan):
        time.append((COVERED, -step.covered))
    if busiest.ahead:
        time.append((AHEAD, -m * busiest.ahead))
    clusters = clusters_of_ranks(cluster, len(costs))
    wanted = [sum(cost.memory.values()) for cost in costs]
    peaks = [stage_peak(cost, own) for cost, own in zip(costs, clusters, strict=True)]
    fullest = max(range(len(costs)), key=lambda rank: (peaks[rank] / clusters[rank].device.memory, wanted[rank]))
    memory = [*costs[fullest].memory.items(), (SLACK, peaks[fullest] - wanted[fullest])]
    outside = max(costs, key=lambda cost: sum(cost.offloaded.values())).offloaded
    spreads = [spread_of(part.name, experts) for part in parts_of(cluster)]
    peak_flops = [own.device.peak(plan.training.precision) for own in clusters]
    useful = plan.training.global_batch / plan.training.padded_batch  # samples of weight zero do no useful work
    flops = flops_per_part * m * useful
    devices = plan.cluster.devices
    return Prediction(
        step_seconds=step.seconds,
        objective_seconds=float(step_time(per_part, per_step, m, virtual)),
        peak_bytes=peaks[fullest],
        high_peak_bytes=peaks[fullest] * clusters[fullest].software.peak_high,
        capacity_bytes=clusters[fullest].device.memory,
        model_flops=flops,
        model_flops_utilisation=flops / (step.seconds * devices * _mean(peak_flops)),
        samples_per_second=plan.training.global_batch / step.seconds,
        low_seconds=step.seconds * min(spread.low for spread in spreads),
        high_seconds=step.seconds * max(spread.high for spread in spreads),
        time=tuple(time),
        memory=tuple(memory),
        offloaded=tuple((home, outside[home]) for home in HOMES if outside[home]),
        stages=tuple(
            StagePrediction(micro_batch_seconds=part, once_seconds=once, peak_bytes=bytes_, ahead_seconds=cost.ahead)
            for part, once, bytes_, cost in zip(per_part, per_step, peaks, costs, strict=True)
        ),
    )


def _covered(cost: StageCost) -> Seconds:
    """Seconds of gradient reduction in the objective that last backward passes cover: the same share as of the real
    collectives. Copies are not covered."""
    taken = cost.all_once["gradient reduction"] - cost.copied
    covered = covered_reductions(cost.chunks)
    return (cost.once["gradient reduction"] - cost.copied) * min(1.0, covered / taken) if covered else 0.0


def _part_seconds(cost: StageCost) -> Seconds:
    """Seconds of a micro-batch on a rank in the objective. Weights and gradients that overlap with other blocks count
    only beyond the work of their pass. Overlapped collectives under products, and of experts, are subtracted."""
    passes = [one for chunk in cost.chunks for one in chunk.passes]
    gathered = sum(one.gathered for one in passes)
    uncovered = sum(max(0.0, one.gathered - one.work) for one in passes)
    saved = sum(one.under_products + one.exchanged for one in passes)
    return sum(cost.all_micro_batch.values()) - gathered + uncovered - saved


def _mean(values: Sequence[float]) -> float:
    """The mean; exactly the value if all are equal."""
    return values[0] if len(set(values)) == 1 else sum(values) / len(values)
