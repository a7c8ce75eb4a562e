"""The machine that a plan is for: how a plan names it, and how it is found again."""

from collections.abc import Sequence
from dataclasses import replace

from costmodels import SCHEDULES
from hardware_profiles import (
    Cluster,
    Machine,
    TopologyError,
    UnknownProfileError,
    clusters_of_ranks,
    compose,
    is_mixed,
    load_machine,
    load_mixed,
    load_profile,
    load_software,
    parse_mixed,
    parts_of,
    profile_names,
)
from planner.errors import PlanFileError, RequestError, did_you_mean
from planner.plan.plan import ClusterReference, Stage, products_in


def cluster_reference(cluster: Machine) -> ClusterReference:
    """What a plan says of its machine."""
    return ClusterReference(
        profile=cluster.name,
        digest=cluster.digest(),
        devices=cluster.devices,
        composition=cluster.composition,
        software=cluster.software.name,
        products=cluster.software.products,
    )


def machine_of(reference: ClusterReference, profile: str | None = None) -> Machine:
    """The machine that a plan names, with the devices that it uses.

    `profile` is the name or the file of its profile, where that differs from the name in the plan. Raises
    `HardwareProfileError` where there is no such profile or it cannot have as many devices, PlanFileError where the
    composition cannot be read.
    """
    if profile is None and reference.profile not in profile_names() and not is_mixed(reference.profile):
        near = did_you_mean(reference.profile, profile_names())
        hint = f" ({near})" if near else ""
        raise UnknownProfileError(
            f"the plan was made for the profile '{reference.profile}', which is none of those shipped{hint}; give its"
            f" file, as in --hardware {reference.profile}.toml"
        )
    software = load_software(reference.software)
    if reference.products:
        software = replace(software, products=reference.products)
    if is_mixed(profile or reference.profile):
        return load_mixed(profile or reference.profile).with_software(software).with_devices(reference.devices)
    cluster = load_profile(profile or reference.profile)
    if reference.composition:
        try:
            cluster = compose(cluster, reference.composition)
        except TopologyError as error:
            raise PlanFileError(f"cluster.composition '{reference.composition}': {error}") from error
    return cluster.with_software(software).with_devices(reference.devices)


def own_machine(reference: ClusterReference, profile: str | None) -> Machine:
    """The machine that a plan names, from the file of a profile if that has the plan's name. Raises as
    `machine_of`."""
    named = profile is not None and load_machine(profile).name == reference.profile
    return machine_of(reference, profile if named else None)


def computing_in(machine: Machine, precision: str) -> Machine:
    """The machine with its matrix products in a precision that applies to products only.

    Raises RequestError where the devices have no products in it.
    """
    products = products_in(precision)
    if not products or machine.software.products == products:
        return machine
    for part in parts_of(machine):
        if not part.device.multiplies(products):
            raise RequestError(f"precision = {precision}: {part.name} has no products in it; take fp32, or bf16")
    return machine.with_software(replace(machine.software, products=products))


def groups_of_ranks(reference: ClusterReference, ranks: int) -> tuple[str, ...]:
    """The profile of the devices of each pipeline rank, as the reference has it; empty where all devices are alike.

    Raises PlanFileError where the groups cannot be read, or a rank would lie in two of them.
    """
    if not is_mixed(reference.profile):
        return ("",) * ranks
    try:
        choices, _ = parse_mixed(reference.profile)
    except TopologyError as error:
        raise PlanFileError(f"cluster.profile '{reference.profile}': {error}") from error
    homes = [choice.profile for choice in choices for _ in range(choice.devices)]
    size = reference.devices // ranks
    found = [homes[rank * size : (rank + 1) * size] for rank in range(ranks)]
    if len(homes) != reference.devices or any(len(set(own)) != 1 for own in found):
        raise PlanFileError(
            f"cluster.profile '{reference.profile}': {ranks} stages of {size} devices do not lie within its groups"
        )
    return tuple(own[0] for own in found)


def placed(stages: Sequence[Stage], ranks: int, cluster: Machine, schedule: str) -> tuple[Stage, ...]:
    """The stages, dealt to `ranks` pipeline ranks as a schedule does it, with their devices."""
    if isinstance(cluster, Cluster):
        return tuple(replace(stage, group="") for stage in stages)
    homes = clusters_of_ranks(cluster, ranks)
    kind = SCHEDULES[schedule]
    return tuple(replace(stage, group=homes[kind.rank_of(number, ranks)].name) for number, stage in enumerate(stages))
