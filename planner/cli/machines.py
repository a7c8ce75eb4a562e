"""The machine that `--hardware`, `--cluster` and `--devices` describe."""

from typing import TYPE_CHECKING

from planner.errors import RequestError

if TYPE_CHECKING:
    from hardware_profiles import Cluster


def machine(profile: str, levels: str | None, devices: int) -> "Cluster":
    """A profile, or what is composed of it, with so many devices in use. Raises RequestError for bad levels."""
    from hardware_profiles import TopologyError, compose, load_profile

    cluster = load_profile(profile)
    if levels is not None:
        try:
            cluster = compose(cluster, levels)
        except TopologyError as error:
            raise RequestError(f"--cluster '{levels}': {error}") from error
    return cluster.with_devices(devices)
