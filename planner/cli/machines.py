"""Numbers from `--hardware` and `--devices`, before a machine is built."""

import math


def devices_of(profile: str) -> int:
    """Number of devices of a profile, or of all groups of a heterogeneous pipeline."""
    from hardware_profiles import load_machine

    return load_machine(profile).devices


def fewest_stages(profile: str) -> int:
    """The minimum number of pipeline stages, each within one group and all with equally many devices; 1 for one kind of
    devices."""
    from hardware_profiles import is_mixed, parse_mixed

    if not is_mixed(profile):
        return 1
    sizes = [group.devices for group in parse_mixed(profile)[0]]
    return sum(sizes) // math.gcd(*sizes) if all(sizes) else 1
