"""A plan on another machine: the same choices, priced by the numbers of that machine.

The mesh keeps its shape and gets the links of the new cluster. For another number of devices the data parallel axis is
made longer or shorter; the global batch stays what it is, so each group has less or more of it to do.
"""

import math
from dataclasses import replace

from hardware_profiles import Machine
from planner.errors import RequestError
from planner.graph.operator_graph import OperatorGraph
from planner.plan.binding.bind import BoundPlan, bind
from planner.plan.binding.machine import cluster_reference, placed
from planner.plan.layout.roles import roles
from planner.plan.plan import Plan
from planner.plan.prediction.predict import predict
from planner.sharding.mesh import build_mesh


def repriced(plan: Plan, traced: OperatorGraph, batch: int, cluster: Machine) -> BoundPlan:
    """The plan on a cluster, bound to the traced graph of its model, with a new prediction.

    Raises RequestError where no data parallel axis can be stretched to the devices, PlanFileError, StrategyError or
    LayoutError where the plan is not legal there.
    """
    sizes = _sizes(plan, traced, batch, cluster.devices)
    known = cluster_reference(cluster)
    mesh = build_mesh(cluster, sizes, zigzag=plan.mesh.zigzag)
    moved = replace(plan, cluster=known, mesh=mesh, stages=placed(plan.stages, plan.pipeline, cluster))
    if moved.cluster != plan.cluster:  # nothing is proved about it there
        moved = replace(moved, provenance=replace(plan.provenance, status="feasible", gap=1.0))
    bound = bind(moved, traced, batch)
    return replace(bound, plan=replace(moved, prediction=predict(bound, cluster)))


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
