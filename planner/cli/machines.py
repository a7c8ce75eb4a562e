"""The machine that `--hardware`, `--cluster`, `--software` and `--devices` describe."""

from typing import TYPE_CHECKING

from planner.errors import RequestError

if TYPE_CHECKING:
    from hardware_profiles import Cluster


def machine(profile: str, levels: str | None, software: str | None, devices: int) -> "Cluster":
    """A profile, or what is composed of it, with so many devices in use, run by a training stack. Raises RequestError
    for bad levels."""
    from hardware_profiles import PYTORCH, TopologyError, compose, load_profile, load_software

    cluster = load_profile(profile)
    if levels is not None:
        try:
            cluster = compose(cluster, levels)
        except TopologyError as error:
            raise RequestError(f"--cluster '{levels}': {error}") from error
    return cluster.with_software(load_software(PYTORCH.name if software is None else software)).with_devices(devices)
