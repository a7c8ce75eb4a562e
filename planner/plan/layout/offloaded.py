"""What a plan offloads: in which order updates need it, and whether it fits into the offload storage."""

import math
from collections.abc import Collection

from costmodels import ROW_MOMENTS
from hardware_profiles import Bytes, Machine, parts_of
from hardware_profiles.units import bytes_text
from planner.faults import Fault
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.per_step_communication import gathering_buckets
from planner.plan.plan import Prediction

_TOLERANCE = 1e-9


def offloaded_fault(prediction: Prediction, cluster: Machine) -> Fault | None:
    """What exceeds the capacity of its offload storage; None where all fits. With several kinds of devices each kind
    must have the capacity."""
    for home, nbytes in prediction.offloaded:
        least = min(parts_of(cluster), key=lambda part: part.store(home).capacity)
        room = least.store(home).capacity
        if nbytes > room * (1 + _TOLERANCE):
            return Fault(
                reason=f"{bytes_text(nbytes)} are kept on the {home} for each device, and {least.name} has"
                f" {bytes_text(room)} there for it"
            )
    return None


def beyond_host(prediction: Prediction, cluster: Machine) -> Bytes:
    """Bytes by which what a plan keeps on the host exceeds the host's memory; negative if memory is left."""
    kept = dict(prediction.offloaded).get("host", 0.0)
    return kept - min(part.store("host").capacity for part in parts_of(cluster)) if kept else -math.inf


def tables_on_hosts(bound: BoundPlan) -> Bytes:
    """Bytes of tables on the hosts, with the state of their optimizers, for each of the devices that share them out."""
    tables = {
        str(dict(op.operator.keywords)["table"]): op.rule.outside
        for op in bound.operators
        if op.rule.outside is not None and op.rule.outside.place == "host"
    }
    kept = 1 + ROW_MOMENTS.get(bound.plan.training.optimizer, 0)
    return (
        sum(one.rows * one.row_bytes * (kept if one.trained else 1) for one in tables.values()) / bound.plan.mesh.size
    )


def visiting_order(bound: BoundPlan, held: Collection[str]) -> tuple[str, ...]:
    """The parameters of a rank with offloaded states, in the order of their updates: members of a bucket of new weights
    one after the other, so that the bucket is complete early, then the others in the order of the model."""
    every = bound.once("offloaded states", lambda: [name for name, one in bound.parameters.items() if one.offloaded])
    offloaded = [name for name in every if name in held]
    if not offloaded:
        return ()
    together = [name for bucket in gathering_buckets(bound, held) for name in bucket.names]
    first = {name: at for at, name in enumerate(together)}
    places = {parameter.name: at for at, parameter in enumerate(bound.graph.parameters)}
    return tuple(sorted(offloaded, key=lambda name: (first.get(name, len(first)), places[name])))
