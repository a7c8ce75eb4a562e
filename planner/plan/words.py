"""A plan in a few words, so that plans can be told apart at a glance."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hardware_profiles.units import MIB, digits_text
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.roles import Roles
from planner.plan.plan import RECOMPUTATION, Plan
from planner.sharding.stored import owned_axes
from planner.sharding.update import PARAMETERS, PLAIN, SERVERS, SLICES, Update, bucket_numbers, split_positions

OWNERS = {
    PARAMETERS: "optimizer states by whole parameters, new weights broadcast",
    SERVERS: "parameter servers on the hosts: gradients pushed, new weights pulled",
}
"""Who holds the states that are not cut, by `Update.zero_by`."""


_SPLITS = 6
"""Most ends of buckets that are listed one by one."""


def plan_words(bound: BoundPlan, roles: Roles) -> dict[str, str]:
    """The choices that set one plan apart from another, each under its name. The keys are always the same."""
    plan = bound.plan
    degrees = {
        "data": roles.data,
        "tensor": roles.tensor,
        "context": roles.context,
        "pipeline": roles.pipeline,
        "replicated": roles.replicated,
    }
    return {
        "devices": str(plan.cluster.devices),
        "degrees": " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "one device",
        "expert": str(roles.expert),
        "mesh": "x".join(map(str, plan.mesh.sizes)) or "1",
        "virtual stages": str(plan.virtual_stages),
        "schedule": plan.schedule if plan.pipeline > 1 else "none",
        "slices": str(plan.slices),
        "micro-batches": f"{plan.training.micro_batches} of {plan.training.part}",
        "interleave": str(plan.training.interleave),
        "tensor overlap": tensor_overlap_words(plan.training.tensor_overlap),
        "expert overlap": expert_overlap_words(plan.training.expert_overlap),
        "sequence parallel": "yes" if roles.sequence_parallel else "no",
        "ZeRO": roles.zero.partition(" ")[0] + (f" in {roles.replicas} replicas" if roles.replicas > 1 else ""),
        "recomputation": recomputation_words(plan),
        "offload": roles.offload,
    }


def recomputation_words(plan: Plan) -> str:
    """`full`, or how many blocks are run in which way: `34 none, 45 selective, 1 full`."""
    counts: dict[str, int] = dict.fromkeys(RECOMPUTATION, 0)
    for group in plan.groups:
        counts[group.recomputation] += group.blocks
    used = [(word, count) for word, count in counts.items() if count]
    return ", ".join(f"{count} {word}" for word, count in used) if len(used) > 1 else (used or [("none", 0)])[0][0]


def activations_words(plan: Plan) -> str:
    """How blocks are run and, where some are offloaded, where their activations are kept: `4 none; 2 blocks on the
    host`."""
    homes: dict[str, int] = {}
    for group in plan.groups:
        homes[group.activations_home] = homes.get(group.activations_home, 0) + group.blocks
    away = [f"{count} blocks on the {home}" for home, count in sorted(homes.items()) if home != "device"]
    return "; ".join([recomputation_words(plan), *away])


def gradient_words(update: Update) -> str:
    """Unusual settings of gradients: `; gradients summed, in buckets of 32.0 MiB`."""
    words = []
    if update.gradients == "sum":
        words.append("summed")
    if update.gradient_dtype != PLAIN.gradient_dtype:
        dtypes = {"fp32": "all in fp32", "parameter": "in the dtype of the weights"}
        words.append(dtypes[update.gradient_dtype])
    if update.clip_norm is not None:
        words.append(f"clipped to norm {update.clip_norm:g}")
    if update.bucketed:
        words.append(_bucket_words(update))
    found = [f"gradients {', '.join(words)}"] if words else []
    found += [] if update.master_weights else ["no master weights"]
    found += [] if update.moment_dtype == PLAIN.moment_dtype else [f"moments in {update.moment_dtype}"]
    if update.by_block:
        found.append(f"weights all-gathered by block{', next block prefetched' if update.ahead else ''}")
    found += [", ".join(f"{name} padded to a multiple of {n}" for name, n in update.padded)] if update.padded else []
    found += [replica_words(update)] if update.per_replica else []
    found += [OWNERS[update.zero_by]] if update.owned else []
    found += ["weights of rank 0 broadcast at the start"] if update.broadcast else []
    found += [f"each device has its own {', '.join(update.local_parameters)}"] if update.local_parameters else []
    return "".join(f"; {text}" for text in found)


def replica_words(update: Update) -> str:
    """The operators that every replica computes by itself."""
    names = ", ".join(update.per_replica)
    if update.replicas == 1:
        return f"{names} over the samples of the only replica"
    return f"{names} over the samples of each of {update.replicas} replicas"


def applied_update(plan: Plan) -> Update:
    """The update settings of a plan, without owners where no parameter has one."""
    update, sizes = plan.training.update, plan.mesh.sizes
    stored = (one for group in plan.groups for name, one in group.parameters if not update.is_local(name))
    if not update.owned or any(owned_axes(one, sizes) for one in stored):
        return update
    return replace(update, zero_by=SLICES)


def table_words(update: Update) -> str:
    """Where tables are that are not on the devices: `tables.* on the host, wide.* on servers`; empty where all are on
    the devices."""
    places = ((pattern, "the host" if place == "host" else place) for pattern, place in update.placed)
    return ", ".join(f"{pattern} on {place}" for pattern, place in places)


def _bucket_words(update: Update) -> str:
    if update.bucket_size:
        return f"in buckets of {digits_text(update.bucket_size / MIB)} MiB"
    if splits := split_positions(update.buckets):
        if len(splits) > _SPLITS:
            return f"in {len(splits) + 1} buckets that end at parameter {splits[0]}, {splits[1]}, ..., {splits[-1]}"
        return f"in buckets that end at parameter {', '.join(map(str, splits))}"
    return f"in {len({number for _, number in bucket_numbers(update.buckets)})} buckets by name"


def telling(rows: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Names of the words in which the plans differ, in their order."""
    return tuple(name for name in rows[0] if len({row[name] for row in rows}) > 1)


def expert_overlap_words(overlap: tuple[tuple[str, int], ...]) -> str:
    """The number of expert layers whose exchange is overlapped."""
    return f"the exchange of {_operators(len(overlap))} under other work" if overlap else "none"


def tensor_overlap_words(overlap: tuple[tuple[str, int, int, int], ...]) -> str:
    """The numbers of chunks in which collectives of tensor parallelism run under their products."""
    if not overlap:
        return "none"
    counts = sorted({chunks for _, *both, _ in overlap for chunks in both})
    chunks = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"under the products of {_operators(len(overlap))}, in {chunks} chunk{'' if chunks == '1' else 's'}"


def _operators(count: int) -> str:
    return f"{count} operator{'' if count == 1 else 's'}"
