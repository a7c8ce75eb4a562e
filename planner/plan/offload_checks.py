"""What may be offloaded: one list of conflicts, for plans that offload and for requests that ask for it."""

from costmodels import SCHEDULES
from hardware_profiles import PYTORCH, Machine, parts_of
from planner.faults import Fault
from planner.sharding.update import Update


def offload_fault(optimizer: str, schedule: str | None) -> Fault | None:
    """Why states cannot be offloaded; with `optimizer` "", why weights and activations cannot. None where they can."""
    kind = SCHEDULES.get(schedule or "")
    if optimizer == "lamb":
        reason = "LAMB knows the length of a step only when the states of all weights have been read"
    elif optimizer == "muon":
        reason = "Muon makes updates of whole matrices on the device, where their momenta are"
    elif kind is not None and not kind.flushes:
        reason = f"schedule '{schedule}' updates weights in the midst of its micro-batches"
    else:
        return None
    return Fault(option="offload", reason=reason, hint="leave --offload out, or take another optimizer or schedule")


def served_fault(update: Update, optimizer: str) -> Fault | None:
    """Why parameter servers cannot update parameters; None where they can, or where there are none."""
    if not update.served or optimizer not in ("lamb", "muon"):
        return None
    what = (
        "norms of weights that tensor parallelism cuts are summed" if optimizer == "lamb" else "matrices are gathered"
    )
    reason = f"has no {optimizer}: {what} between devices, and servers update on hosts, each by itself"
    return Fault(option="zero_by", value="'servers'", reason=reason, hint="take adamw or sgd, or zero_by = parameters")


def owners_fault(update: Update, machine: Machine) -> Fault | None:
    """Why owners of whole parameters cannot be on a machine; None where they can, or where there are none."""
    if not update.owned:
        return None
    parts, value = parts_of(machine), f"'{update.zero_by}'"
    able = [part.software.name == PYTORCH.name or (part.software.owns_whole and not update.served) for part in parts]
    other = next((part.software.name for part, can in zip(parts, able, strict=True) if not can), None)
    if other is not None:
        reason = f"is about our own runtime, not {other}"
        hint = f"take slices, or set software to {PYTORCH.name}"
        return Fault(option="zero_by", value=value, reason=reason, hint=hint)
    if not update.served:
        return None
    if len(parts) > 1:
        reason = f"is not for {machine.name}, which has several kinds of devices"
        return Fault(option="zero_by", value=value, reason=reason, hint="name one profile, or take parameters")
    if parts[0].host is None:
        reason = f"keeps states on hosts, and profile {parts[0].name} says nothing of the host beside its devices"
        hint = "add a section [host] to it, or take zero_by = parameters"
        return Fault(option="zero_by", value=value, reason=reason, hint=hint)
    return None


def saved_fault(update: Update, *, sliced: bool) -> Fault | None:
    """Why blocks that are not recomputed cannot offload what they save; None where they can."""
    if sliced:
        reason, instead = "slices of the sequence read what others have saved", "--slices and the schedule"
    elif update.by_block:
        reason = "what blocks save is not offloaded where weights are gathered block by block"
        instead = "gather them one by one"
    else:
        return None
    return Fault(option="offload", reason=reason, hint=f"leave saved out of --offload, or {instead}")
