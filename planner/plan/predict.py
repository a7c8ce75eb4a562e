"""What a bound plan costs, computed operator by operator over the whole graph.

This is the judge. The search fills tables for one block and multiplies; here nothing is folded, tabulated or shared
between stages, so that an error in the search shows as a difference between the two. Both use the prices of
`planner.pricing`.

    rank r:   t_r  seconds of one micro-batch, forward and backward, with the transfers it waits for
              u_r  seconds once a step: gradients, optimizer, weights
    step   =  what the schedule makes of them (see planner.plan.step)
    objective  =  m max t_r + (sum t_r - max t_r) / v + max u_r     (1F1B of v virtual stages, see costmodels.schedules)
    memory =  weights + gradients + states + in_flight * kept activations + largest transient, then allocator slack

A pipeline rank holds v stages of the model (v = 1: its one stage), and is what `planner.plan.walk` sums up.

The objective is what the search minimises and proves gaps about. Both charge the share of communication that software
does not hide; the step also asks whether there is work enough to hide the rest under.
"""

import math
from collections.abc import Sequence

from costmodels import peak_memory, step_time
from hardware_profiles import HOMES, Bytes, Cluster, spread_of
from planner.plan.bind import BoundPlan
from planner.plan.plan import Plan, Prediction, StagePrediction
from planner.plan.stage_cost import StageCost
from planner.plan.step import AHEAD, BESIDE, COVERED, PIPELINE_BUBBLE, UNCOVERED, step_of
from planner.plan.walk import Walk, hides


def predict(bound: BoundPlan, cluster: Cluster) -> Prediction:
    """Step time and peak memory of a plan, in parts that sum to the whole."""
    (found,) = predict_alike([bound], cluster)
    assert found is not None
    return found


def predict_alike(bounds: Sequence[BoundPlan], cluster: Cluster, limit: Bytes = math.inf) -> list[Prediction | None]:
    """`predict` for plans that differ in their schedule only: prices of operators and messages are found once. None for
    one of which some rank needs more than `limit` bytes."""
    found, walk = list[Prediction | None](), Walk(bound=bounds[0], cluster=cluster)
    for bound in bounds:
        walk.begin(bound)
        costs = list[StageCost]()
        while len(costs) < bound.plan.pipeline and (not costs or _peak(costs[-1], cluster) <= limit):
            costs.append(walk.rank(len(costs)))
        if _peak(costs[-1], cluster) > limit:
            found.append(None)
            continue
        experts = any(operator.rule.op_class == "experts" for operator in bound.operators)
        found.append(_assemble(bound.plan, walk.flops, costs, cluster, experts=experts))
    return found


def _peak(cost: StageCost, cluster: Cluster) -> Bytes:
    return float(peak_memory(sum(cost.memory.values()), 0.0, 0.0, cluster.device))


def stage_costs(bound: BoundPlan, cluster: Cluster) -> tuple[StageCost, ...]:
    """The sums of every pipeline rank, for those who want to look inside."""
    walk = Walk(bound=bound, cluster=cluster)
    return tuple(walk.rank(rank) for rank in range(bound.plan.pipeline))


def _assemble(
    plan: Plan, flops_per_part: float, costs: list[StageCost], cluster: Cluster, *, experts: bool
) -> Prediction:
    m, virtual = plan.training.micro_batches * plan.slices, plan.virtual_stages
    per_part = [sum(cost.micro_batch.values()) for cost in costs]
    per_step = [sum(cost.once.values()) for cost in costs]
    step = step_of([cost.chunks for cost in costs], [cost.all_once for cost in costs], m // plan.slices, plan.schedule)
    busiest = costs[step.busiest]
    time = [(name, m * seconds) for name, seconds in busiest.micro_batch.items()]
    time += [(PIPELINE_BUBBLE, step.bubble), *busiest.all_once.items()]
    beside = m * sum(one.beside for chunk in busiest.chunks for one in chunk.passes)
    if beside:
        time.append((BESIDE, -beside))
    if hides(cluster) or beside:
        time.append((UNCOVERED, step.uncovered))
    if plan.training.copies > 1:
        time.append((COVERED, -step.covered))
    if busiest.ahead:
        time.append((AHEAD, -m * busiest.ahead))
    fullest = max(costs, key=lambda cost: sum(cost.memory.values()))
    wanted = sum(fullest.memory.values())
    peaks = [_peak(cost, cluster) for cost in costs]
    peak = max(peaks)
    memory = [*fullest.memory.items(), ("allocator slack and reserved", peak - wanted)]
    outside = max(costs, key=lambda cost: sum(cost.parked.values())).parked
    spread = spread_of(cluster.name, experts)
    flops = flops_per_part * m
    devices = plan.cluster.devices
    return Prediction(
        step_seconds=step.seconds,
        objective_seconds=float(step_time(per_part, per_step, m, virtual)),
        peak_bytes=peak,
        capacity_bytes=cluster.device.memory,
        model_flops=flops,
        model_flops_utilisation=flops / (step.seconds * devices * cluster.device.peak(plan.training.precision)),
        samples_per_second=plan.training.global_batch / step.seconds,
        low_seconds=step.seconds * spread.low,
        high_seconds=step.seconds * spread.high,
        time=tuple(time),
        memory=tuple(memory),
        parked=tuple((home, outside[home]) for home in HOMES if outside[home]),
        stages=tuple(
            StagePrediction(micro_batch_seconds=part, once_seconds=once, peak_bytes=bytes_)
            for part, once, bytes_ in zip(per_part, per_step, peaks, strict=True)
        ),
    )
