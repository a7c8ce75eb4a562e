"""Plans that offload states, activations and weights outside of the device."""

import re
from collections.abc import Callable
from dataclasses import replace

from hardware_profiles import Home
from planner.plan.plan import Plan

Homes = Callable[[str], Home]


def everywhere(home: Home) -> Homes:
    """All states in one place."""
    return lambda name: home


def staying(name: str) -> Home:
    """All on the device."""
    return "device"


def mixed(name: str) -> Home:
    """Some stay, some are on the host, some on a disk."""
    return "device" if name.endswith("bias") or "norm" in name else "host" if "mlp" in name else "disk"


def homes_of(word: str) -> Homes:
    """All in the home of that name, or "mixed"."""
    return mixed if word == "mixed" else everywhere(word)  # type: ignore[arg-type]


def of_blocks(home: Home, pattern: str = "") -> Homes:
    """The weights of numbered blocks in one place, or those of them whose names match."""
    return lambda name: home if re.search(r"\.\d+\.", name) and re.search(pattern, name) else "device"


def offloaded(
    plan: Plan, homes: Homes, activations: Home = "device", weights: Homes = staying, saved: Home = "device"
) -> Plan:
    """The same plan with the state and the weight of every parameter where `homes` and `weights` say, what flows into
    recomputed blocks where `activations` does, and what other blocks save where `saved` does."""

    def moved(group):  # type: ignore[no-untyped-def]
        parameters = (
            (name, replace(stored, state_home=homes(name), weight_home=weights(name)))
            for name, stored in group.parameters
        )
        home = "device" if not group.blocks else saved if group.recomputation == "none" else activations
        return replace(group, parameters=tuple(parameters), activations_home=home)

    return replace(plan, groups=tuple(moved(group) for group in plan.groups))
