"""Bytes over the link between a host and its device: rows of tables outside of the devices, for each look-up.

    forward     n w bytes to the device          n = rows that a device looks up per micro-batch, all assumed different
    backward    n w bytes from it                w = bytes of a row, in the dtype of the table

At most as many rows as the table has. Of devices that look up the same ids only one sends back gradients: the first
along each axis that does not split the ids.

Once a step, sums of gradients are pushed to parameter servers, and new weights are pulled:

    update      g n bytes from the device that owns a parameter, w n bytes to it
"""

import math
from collections import Counter
from collections.abc import Mapping

from hardware_profiles import Bytes
from planner.plan.binding.bind import BoundOperator, BoundPlan, stage_of_operators
from planner.plan.layout.parameter_owners import owners_of
from planner.plan.prediction.charges import Phase
from planner.pricing.liveness import replays
from planner.pricing.parameter_price import summed
from planner.sharding.layout import local_share
from planner.sharding.mesh import Mesh
from planner.sharding.rule import loop_extents

Crossing = Mapping[tuple[Phase, str], Bytes]
"""Bytes of a micro-batch by phase and operator."""


def crossing_rows(bound: BoundPlan, rank: int, place: int) -> Crossing:
    """Bytes over the link of the device at a place of the mesh of a pipeline rank."""
    found: dict[tuple[Phase, str], Bytes] = {}
    again, mesh, stages = replays(bound.graph, bound.blocks), bound.plan.mesh, stage_of_operators(bound)
    for at, op in enumerate(bound.operators):
        if op.rule.outside is None or bound.plan.rank_of(stages[at]) != rank:
            continue
        nbytes, block = _bytes(op, mesh), bound.blocks.block_of(at)
        found["forward", op.operator.name] = nbytes
        if op.rule.outside.trained and gives_back(op, mesh, place):
            found["backward", op.operator.name] = nbytes
        if block is None or bound.recompute_of(block) is None or bound.is_kept(at):
            continue
        if bound.place_of(at) < again[bound.blocks.kinds[block]].works:
            found["recomputation", op.operator.name] = nbytes
    return found


def crossing_parameters(bound: BoundPlan, rank: int, place: int) -> Counter[tuple[Phase, str, Bytes]]:
    """How often a step sends this many bytes of a parameter over the link of the device at a place of the mesh of a
    pipeline rank; empty without parameter servers."""
    plan, found = bound.plan, Counter[tuple[Phase, str, Bytes]]()
    if not plan.training.update.served:
        return found
    stages, coordinate = stage_of_operators(bound), plan.mesh.coordinate(place)
    own = [at for at in range(len(bound.operators)) if plan.rank_of(stages[at]) == rank]
    held = {name for at in own for name in bound.graph.operators[at].operands if name in bound.parameters}
    for name, owner in owners_of(bound, held).items():
        if owner.at(coordinate):
            tensor = bound.graph.types[name]
            share = local_share(tensor.shape, bound.parameters[name].weight, plan.mesh.sizes)
            found["update", name, share * summed(tensor, plan.training.update).nbytes] += 1
            found["update", name, share * tensor.nbytes] += 1
    return found


def gives_back(op: BoundOperator, mesh: Mesh, place: int) -> bool:
    """Whether a device sends back the gradients of the rows that it looked up, if other devices have them, too."""
    coordinate = mesh.coordinate(place)
    return all(choice is not None or coordinate[axis] == 0 for axis, choice in enumerate(op.strategy))


def _bytes(op: BoundOperator, mesh: Mesh) -> Bytes:
    outside = op.rule.outside
    assert outside is not None
    extents = loop_extents(op.rule, op.strategy, mesh)
    return min(math.prod(extents[factor] for factor in outside.ids), outside.rows) * outside.row_bytes
