"""The machine that `--hardware`, `--cluster`, `--software` and `--devices` describe."""

import math
from typing import TYPE_CHECKING

from planner.errors import RequestError

if TYPE_CHECKING:
    from hardware_profiles import Machine


def machine(profile: str, levels: str | None, software: str | None, devices: int) -> "Machine":
    """A profile, or what is composed of it, or groups of several, with so many devices in use, run by a training stack.
    Raises RequestError for bad levels."""
    from hardware_profiles import PYTORCH, TopologyError, compose, is_mixed, load_mixed, load_profile, load_software

    if is_mixed(profile):
        if levels is not None:
            raise RequestError(
                f"--cluster '{levels}': of several groups of devices each has levels of its own; write them in brackets"
                " behind its profile, as in --hardware 'h100-80gb[node=8,cluster@25]:32,a100-80gb:32'"
            )
        mixed = load_mixed(profile).with_software(load_software(PYTORCH.name if software is None else software))
        return mixed.with_devices(devices)
    cluster = load_profile(profile)
    if levels is not None:
        try:
            cluster = compose(cluster, levels)
        except TopologyError as error:
            raise RequestError(f"--cluster '{levels}': {error}") from error
    return cluster.with_software(load_software(PYTORCH.name if software is None else software)).with_devices(devices)


def devices_named(profile: str) -> int | None:
    """How many devices groups of several kinds have in all; None where one profile is named."""
    from hardware_profiles import is_mixed, parse_mixed

    if not is_mixed(profile):
        return None
    return sum(group.devices for group in parse_mixed(profile)[0])


def fewest_stages(profile: str) -> int:
    """The fewest pipeline stages, each within one group, all of equally many devices; 1 for one kind of devices."""
    from hardware_profiles import is_mixed, parse_mixed

    if not is_mixed(profile):
        return 1
    sizes = [group.devices for group in parse_mixed(profile)[0]]
    return sum(sizes) // math.gcd(*sizes) if all(sizes) else 1
