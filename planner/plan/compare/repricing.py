"""A plan on another machine: the same choices, priced by the numbers of that machine.

The mesh keeps its shape and gets the links of the new cluster. For another number of devices the data parallel axis is
made longer or shorter; the global batch stays what it is, so each group has less or more of it to do, in fewer
micro-batches where they would be too small for the longer axis.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from hardware_profiles import Machine
from planner.errors import LayoutError, PlanFileError, RequestError, StrategyError
from planner.graph.operator_graph import OperatorGraph
from planner.plan.binding.bind import BoundPlan, bind
from planner.plan.binding.machine import cluster_reference, computing_in, placed
from planner.plan.layout.roles import roles
from planner.plan.plan import Plan
from planner.plan.prediction.predict import predict
from planner.plan.samples import samples_fault
from planner.sharding.mesh import NODE, build_mesh


def repriced(plan: Plan, traced: OperatorGraph, batch: int, cluster: Machine) -> BoundPlan:
    """The plan on a cluster, bound to the traced graph of its model, with a new prediction.

    Raises RequestError where no data parallel axis can be stretched to the devices, or these do not compute in the
    plan's precision, PlanFileError, StrategyError or LayoutError where the plan is not legal there.
    """
    cluster = computing_in(cluster, plan.training.precision)
    sizes = _sizes(plan, traced, batch, cluster.devices)
    known = cluster_reference(cluster)
    mesh = build_mesh(cluster, sizes, zigzag=plan.mesh.zigzag, alltoall=_with_alltoall(plan, cluster, sizes))
    moved = replace(plan, cluster=known, mesh=mesh, stages=placed(plan.stages, plan.pipeline, cluster, plan.schedule))
    if moved.cluster != plan.cluster:  # nothing is proved about it there
        moved = replace(moved, provenance=replace(plan.provenance, status="feasible", gap=1.0))
    bound = _bound(moved, traced, batch, grown=cluster.devices > plan.cluster.devices)
    return replace(bound, plan=replace(bound.plan, prediction=predict(bound, cluster)))


def _with_alltoall(plan: Plan, cluster: Machine, sizes: Sequence[int]) -> list[bool]:
    """For each axis whether it has the all-to-all: as in the plan, and no axis that lies now on links that lack it."""
    has = [axis.alltoall for axis in plan.mesh.axes]
    if plan.alltoall != NODE:
        return has
    there = build_mesh(cluster, sizes, alltoall=NODE)
    return [own and axis.alltoall for own, axis in zip(has, there.axes, strict=True)]


def _bound(plan: Plan, traced: OperatorGraph, batch: int, *, grown: bool) -> BoundPlan:
    """The plan bound to its graph. On more devices a micro-batch may have too few samples for the longer data parallel
    axis: then as many micro-batches as still divide, fewer than before, and so larger ones.

    Raises RequestError where not even one micro-batch has a sample for every device, as far as that is the reason.
    """
    try:
        return bind(plan, traced, batch)
    except (LayoutError, PlanFileError, StrategyError):
        if not grown:
            raise
        training = plan.training
        for fewer in (n for n in range(training.micro_batches - 1, 0, -1) if training.micro_batches % n == 0):
            with suppress(LayoutError, PlanFileError, StrategyError):
                return bind(replace(plan, training=replace(training, micro_batches=fewer)), traced, batch)
        alone = replace(plan, training=replace(training, micro_batches=1))
        if samples_fault(alone) is None:  # something else is in the way
            return bind(alone, traced, batch)
        devices = plan.cluster.devices
        words = "too few" if training.padded_batch * plan.pipeline < devices else "not divisible"
        raise RequestError(
            f"{training.padded_batch} samples a step are {words} for the data parallel axis of {devices} devices"
            f" (mesh {'x'.join(map(str, plan.mesh.sizes))}), in any number of micro-batches; a global batch of"
            f" {_batch_for(plan)} would be enough"
        ) from None


def _batch_for(plan: Plan) -> int:
    """Samples a step of which every micro-batch has one for each device of a stage at least."""
    least = math.prod(plan.mesh.sizes) * plan.training.micro_batches
    return least * -(-plan.training.padded_batch // least)


def _sizes(plan: Plan, traced: OperatorGraph, batch: int, devices: int) -> tuple[int, ...]:
    """Sizes of the axes on so many devices."""
    sizes = list(plan.mesh.sizes)
    if devices == plan.cluster.devices:
        return tuple(sizes)
    axes = roles(bind(plan, traced, batch)).axes
    for place, axis in sorted(enumerate(axes), key=lambda found: found[1].experts):  # experts may not divide further
        rest = math.prod(sizes[:place] + sizes[place + 1 :]) * plan.pipeline
        if axis.role == "data" and devices % rest == 0:
            sizes[place] = devices // rest
            return tuple(sizes)
    shape = "x".join(map(str, sizes)) or "1"
    raise RequestError(
        f"the plan has {plan.pipeline} pipeline stages of mesh {shape} and no data parallel axis that can be stretched"
        f" to {devices} devices; plan again for as many"
    )
