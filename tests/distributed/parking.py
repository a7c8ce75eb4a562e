"""Plans whose optimizer states are parked outside of the device."""

from collections.abc import Callable
from dataclasses import replace

from hardware_profiles import Home
from planner.plan.plan import Plan

Homes = Callable[[str], Home]


def everywhere(home: Home) -> Homes:
    """All states in one place."""
    return lambda name: home


def mixed(name: str) -> Home:
    """Some stay, some are on the host, some on a disk."""
    return "device" if name.endswith("bias") or "norm" in name else "host" if "mlp" in name else "disk"


def homes_of(word: str) -> Homes:
    """All in the home of that name, or "mixed"."""
    return mixed if word == "mixed" else everywhere(word)  # type: ignore[arg-type]


def parked(plan: Plan, homes: Homes, activations: Home = "device") -> Plan:
    """The same plan with the state of every parameter where `homes` says, and what flows into recomputed blocks."""

    def moved(group):  # type: ignore[no-untyped-def]
        parameters = ((name, replace(stored, state_home=homes(name))) for name, stored in group.parameters)
        home = "device" if group.recomputation == "none" else activations
        return replace(group, parameters=tuple(parameters), activations_home=home)

    return replace(plan, groups=tuple(moved(group) for group in plan.groups))
