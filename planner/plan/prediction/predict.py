"""What a bound plan costs, computed operator by operator over the whole graph.

This is the judge. The search fills tables for one block and multiplies; here nothing is tabulated or shared between
stages, and a block is left out only where all of it was compared with the one before it, whose numbers are then added
once more (`planner.plan.prediction.repeated_blocks`). So an error in the search shows as a difference between the two.
Both use the prices of `planner.pricing`.

    rank r:   t_r  seconds of one micro-batch, forward and backward, with the transfers it waits for
              u_r  seconds once a step: optimizer, weights, and what of gradients no last backward pass covers
    step   =  what the schedule makes of them (see planner.plan.prediction.step)
    objective  =  m max t_r + (sum t_r - max t_r) / v + max u_r     (1F1B of v virtual stages, see costmodels.schedules)
    memory =  weights + gradients + states + in_flight * kept activations + largest transient, then allocator slack;
              transient is of operators, and of redistributions (planner.plan.prediction.moving_memory)

A pipeline rank holds v stages of the model (v = 1: its one stage), and is what `planner.plan.prediction.walk` sums up.

The objective has everything else wait, one operator after the other, but what of weights, of tensor parallelism and of
experts travels under work; of plans with a pipeline the search proves gaps about it
(`planner.strategy_search.engine.proofs.bounded_seconds`). Both charge the share of communication that software does not
hide; the step also asks whether there is work enough to hide the rest under.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from costmodels import peak_memory, step_time
from hardware_profiles import HOMES, Bytes, Cluster, Machine, Seconds, clusters_of_ranks, parts_of, spread_of
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.segments import segments_by_stage
from planner.plan.plan import Plan, Prediction, StagePrediction
from planner.plan.prediction.moving_memory import hold, most_moving, receive_buffers
from planner.plan.prediction.repeated_blocks import block_keys, repeated_blocks
from planner.plan.prediction.stage_cost import StageCost
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
from planner.plan.prediction.walk import hides, walks_of
from planner.plan.schedule import runs_in_pairs


def predict(bound: BoundPlan, cluster: Machine) -> Prediction:
    """Step time and peak memory of a plan, in parts that sum to the whole. Every pipeline rank is priced by the devices
    that it is on; the fullest is the one that fills most of its own."""
    (found,) = predict_alike([bound], cluster)
    assert found is not None
    return found


def predict_alike(
    bounds: Sequence[BoundPlan], cluster: Machine, limits: Sequence[Bytes] | None = None
) -> list[Prediction | None]:
    """`predict` for plans that differ in their schedule only: prices of operators and messages are found once. None for
    one of which some rank needs more than `limits` says of it, in bytes."""
    found, walks = list[Prediction | None](), walks_of(bounds[0], cluster)
    clusters, apart = clusters_of_ranks(cluster, len(walks)), tuple({id(walk): walk for walk in walks}.values())
    limits = (math.inf,) * len(walks) if limits is None else limits
    moving = most_moving(bounds[0], repeated_blocks(block_keys(bounds[0], walks[0].alive)), walks[0].overlapped)
    for bound in bounds:
        received = receive_buffers(bound)
        of_walks = {id(walk): block_keys(bound, walk.alive) for walk in apart}
        if bound is not bounds[0]:  # with which they have begun
            # which gradients are deferred, and do not go with others, alone depends on the schedule
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
    """Seconds of a step of a plan that interleaves micro-batches, for each number of them: it decides how long their
    messages are covered, and how much they hold, not what any of them computes or sends."""
    costs, plan = stage_costs(bound, cluster), bound.plan
    found = []
    for number in numbers:
        chunks = [[replace(chunk, interleave=number) for chunk in cost.chunks] for cost in costs]
        found.append(
            step_of(chunks, [cost.all_once for cost in costs], plan.training.micro_batches, plan.schedule).seconds
        )
    return found


def stage_peak(cost: StageCost, cluster: Cluster) -> Bytes:
    """The peak of a rank, with what the allocator and libraries take."""
    return float(peak_memory(sum(cost.memory.values()), 0.0, 0.0, cluster.device, cluster.software))


def stage_costs(bound: BoundPlan, cluster: Machine) -> tuple[StageCost, ...]:
    """The sums of every pipeline rank, for those who want to look inside."""
    return tuple(walk.rank(rank) for rank, walk in enumerate(walks_of(bound, cluster)))


def stated_costs(bound: BoundPlan, cluster: Machine) -> tuple[StageCost, ...]:
    """The same with what redistributions take on their way, and what is received ahead, which searches do not count:
    what a plan states."""
    costs, moving, received = stage_costs(bound, cluster), most_moving(bound), receive_buffers(bound)
    for rank, own in enumerate(clusters_of_ranks(cluster, len(costs))):
        hold(costs[rank], moving[rank], received[rank], bound.plan, own)
    return costs


def _assemble(
    plan: Plan, flops_per_part: float, costs: list[StageCost], cluster: Machine, *, experts: bool
) -> Prediction:
    m = plan.training.micro_batches * plan.slices
    virtual = 1 if plan.schedule_kind.v_shaped else plan.virtual_stages  # turns that come in rounds
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
    memory = [*costs[fullest].memory.items(), ("allocator slack and reserved", peaks[fullest] - wanted[fullest])]
    outside = max(costs, key=lambda cost: sum(cost.offloaded.values())).offloaded
    spreads = [spread_of(part.name, experts) for part in parts_of(cluster)]
    peak_flops = [own.device.peak(plan.training.precision) for own in clusters]
    useful = plan.training.global_batch / plan.training.padded_batch  # samples of weight zero are of no use
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
    """What of reductions, as the search sums them, last backward passes cover: the same share as of what their messages
    take. They cover no copies."""
    taken = cost.all_once["gradient reduction"] - cost.copied
    covered = covered_reductions(cost.chunks)
    return (cost.once["gradient reduction"] - cost.copied) * min(1.0, covered / taken) if covered else 0.0


def _part_seconds(cost: StageCost) -> Seconds:
    """What a micro-batch takes on a rank, as the search sums it: weights and gradients that travel while other blocks
    compute take what there is of them beyond the work of their pass, and so do collectives under products and the rows
    of experts."""
    passes = [one for chunk in cost.chunks for one in chunk.passes]
    gathered = sum(one.gathered for one in passes)
    uncovered = sum(max(0.0, one.gathered - one.work) for one in passes)
    saved = sum(one.under_products + one.exchanged for one in passes)
    return sum(cost.all_micro_batch.values()) - gathered + uncovered - saved


def _mean(values: Sequence[float]) -> float:
    """The mean; exactly the value where all are equal."""
    return values[0] if len(set(values)) == 1 else sum(values) / len(values)
