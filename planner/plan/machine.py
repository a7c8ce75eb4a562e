"""The machine that a plan is for: how a plan names it, and how it is found again."""

from hardware_profiles import Cluster, TopologyError, compose, load_profile, load_software
from planner.errors import PlanFileError
from planner.plan.plan import ClusterReference


def cluster_reference(cluster: Cluster) -> ClusterReference:
    """What a plan says of its machine."""
    return ClusterReference(
        profile=cluster.name,
        digest=cluster.digest(),
        devices=cluster.devices,
        composition=cluster.composition,
        software=cluster.software.name,
    )


def machine_of(reference: ClusterReference, profile: str | None = None) -> Cluster:
    """The machine that a plan names, with the devices that it uses.

    `profile` is the name or the file of its profile, where that is not the name in the plan. Raises
    `HardwareProfileError` where there is no such profile or it cannot have so many devices, PlanFileError where the
    composition does not read.
    """
    cluster = load_profile(profile or reference.profile)
    if reference.composition:
        try:
            cluster = compose(cluster, reference.composition)
        except TopologyError as error:
            raise PlanFileError(f"cluster.composition '{reference.composition}': {error}") from error
    return cluster.with_software(load_software(reference.software)).with_devices(reference.devices)
