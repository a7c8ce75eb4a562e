"""What may be offloaded, as requested: for each kind of tensor the places to choose from.

    --offload optimizer             optimizer states, to host memory
    --offload optimizer:disk        optimizer states, to a disk
    --offload activations           inputs of recomputed blocks, until their backward pass
    --offload saved                 saved activations of blocks that are not recomputed
    --offload weights               weights of repeated blocks, between the passes through their block
    --offload optimizer,weights     several
    --offload auto                  device or host, whichever makes the step fastest
    --offload none                  nothing

The default offloads nothing, unless nothing fits on the devices alone or offload makes a step much shorter; it then
acts like auto.
"""

from dataclasses import dataclass, fields, replace

from hardware_profiles import Home
from planner.errors import RequestError, unknown_name
from planner.plan.plan import Plan

_OFFLOADED: tuple[Home, ...] = ("host", "disk")
_EITHER: tuple[Home, ...] = ("device", "host")
_CHOICES: dict[str, tuple[Home, ...]] = {"host": ("host",), "disk": ("disk",), "auto": _EITHER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Places from which the search may choose: for the optimizer state of every parameter, for the inputs of every
    recomputed block, for the saved activations of every other block, and for the weights of every repeated block."""

    optimizer: tuple[Home, ...] = ("device",)
    activations: tuple[Home, ...] = ("device",)
    saved: tuple[Home, ...] = ("device",)
    weights: tuple[Home, ...] = ("device",)

    @property
    def stores(self) -> tuple[Home, ...]:
        """The places outside of the device that may be chosen."""
        asked = {home for kind in fields(self) for home in getattr(self, kind.name)}
        return tuple(home for home in _OFFLOADED if home in asked)


NOTHING = Offload()
"""Everything stays on the device."""

ANYTHING = Offload(optimizer=_EITHER, activations=_EITHER, saved=_EITHER, weights=_EITHER)
"""Everything wherever it makes the step fastest, except on disks."""

KINDS = tuple(kind.name for kind in fields(Offload))
WORDS = ("none", "auto", *KINDS, *(f"{kind}:{home}" for kind in KINDS for home in ("disk", "auto")))
"""Words that are understood; several may be joined by commas."""


def offload_of(plan: Plan) -> Offload:
    """What a plan offloads, as a request that may offload the same tensors or keep them on the device."""
    stored = [one for group in plan.groups for _, one in group.parameters]
    states, weights = {one.state_home for one in stored}, {one.weight_home for one in stored}
    activations = {group.activations_home for group in plan.groups if group.recomputation != "none"}
    saved = {group.activations_home for group in plan.groups if group.recomputation == "none"}

    def among(used: set[Home]) -> tuple[Home, ...]:
        return ("device", *(home for home in _OFFLOADED if home in used))

    return Offload(optimizer=among(states), activations=among(activations), saved=among(saved), weights=among(weights))


def parse_offload(text: str) -> Offload:
    """Parses `--offload`. Raises RequestError for unknown words, and for a kind that is named twice."""
    if text in ("none", "auto"):
        return NOTHING if text == "none" else ANYTHING
    found = NOTHING
    seen = set()
    for word in text.split(","):
        kind, _, home = word.strip().partition(":")
        if kind not in KINDS or home not in ("", *_CHOICES):
            raise RequestError(unknown_name("value for --offload", word.strip(), WORDS))
        if kind in seen:
            raise RequestError(f"--offload {text}: {kind} stands twice; say once where it is kept")
        seen.add(kind)
        found = replace(found, **{kind: _CHOICES[home or "host"]})
    return found
