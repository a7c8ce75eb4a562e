"""Whether a batch divides into micro-batches, and whether the devices that split them can share out the samples."""

import math

from planner.faults import Fault
from planner.nearest import divisors, multiples, nearest_of, nearest_words
from planner.plan.plan import Plan
from planner.sharding.layout import shard
from planner.sharding.update import Update


def samples_fault(plan: Plan) -> Fault | None:
    """Why samples cannot be shared out, with the nearest numbers that work; None where they divide evenly."""
    training, devices = plan.training, _sharing(plan)
    if (fault := _cut_replicas_fault(plan)) is not None:
        return fault
    batch, parts, each = training.padded_batch, training.micro_batches, training.part
    if each % devices == 0:
        return None
    legal = [count for count in divisors(batch) if batch // count % devices == 0]
    near = {"micro_batches": (parts, legal), "global_batch": (batch, multiples(batch, parts * devices))}
    return Fault(
        option="micro_batches",
        value=f"{parts}",
        reason=f"of a global batch of {batch} have {each} sample{'s' * (each > 1)} each, which {devices} devices cannot"
        " share out evenly",
        hint=f"{nearest_of(near)}; or split something else than the batch",
    )


def parts_fault(micro_batches: int, global_batch: int, padding: int = 0) -> Fault | None:
    """Why a global batch, with samples of weight zero behind it, does not divide into this number of equal
    micro-batches with a sample of the batch in each, and the nearest numbers that work; None where it does."""
    whole = global_batch + padding
    what = f"the global batch {global_batch}" + (f" with {padding} of padding_samples" if padding else "")
    numbers = ("micro_batches", "global_batch")
    if whole % micro_batches:
        return Fault(
            option="micro_batches",
            value=f"{micro_batches}",
            reason=f"does not divide {what}",
            hint=nearest_words(micro_batches, [count for count in divisors(whole) if padding < whole // count]),
            numbers=numbers,
        )
    part = whole // micro_batches
    if padding < part:
        return None
    return Fault(
        option="micro_batches",
        value=f"{micro_batches}",
        reason=f"of {what} have {part} sample{'s' * (part > 1)} each, and the last has none of the batch",
        hint="take fewer, or less padding",
        numbers=numbers,
    )


def replicas_fault(update: Update, part: int) -> Fault | None:
    """Why the replicas that compute operators by themselves cannot share out a micro-batch; None where they can."""
    if not update.per_replica or (update.replicas and part % update.replicas == 0):
        return None
    if not update.replicas:
        return Fault(
            option="replicas",
            reason=f"nothing says how many compute {', '.join(update.per_replica)} by themselves",
            hint=f"write the number, a divisor of the {part} samples of a micro-batch, or leave per_replica out",
        )
    return Fault(
        option="replicas",
        value=f"{update.replicas}",
        reason=f"does not divide the {part} samples of a micro-batch, of which each replica has as many",
        hint=nearest_words(update.replicas, divisors(part)),
    )


def _cut_replicas_fault(plan: Plan) -> Fault | None:
    """Why devices cannot have whole replicas; None where they can."""
    update = plan.training.update
    for name, names in (operator for group in plan.groups for operator in group.operators):
        cut = zip(plan.mesh.axes, names, strict=False)
        devices = math.prod(axis.size for axis, factor in cut if factor == "replica")
        if update.per_replica and update.replicas % devices:
            return Fault(
                option="replicas",
                value=f"{update.replicas}",
                reason=f"cannot be shared out by the {devices} devices over which '{name}' is cut by replicas",
                hint=nearest_words(update.replicas, multiples(update.replicas, devices)),
            )
    return None


def _sharing(plan: Plan) -> int:
    """Devices among which the samples of an input are shared out: those of the axes that cut its first dim."""
    shares = [
        math.prod(axis.size for axis, placed in zip(plan.mesh.axes, layout, strict=False) if placed == shard(0))
        for _, layout in plan.inputs
    ]
    return math.lcm(*shares)
