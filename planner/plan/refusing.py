"""Faults of a plan under the keys that its file has."""

from planner.errors import PlanFileError
from planner.faults import Fault, refuse
from planner.plan.plan import Training
from planner.sharding.update import Update

_OF_TRAINING = {*Training.__slots__, *Update.__slots__}
_KEYS = {"place": "placed"}


def plan_key(option: str) -> str:
    """`training.interleave:` for the option `interleave`, `slices:` for `slices`."""
    key = _KEYS.get(option, option)
    return f"training.{key}:" if key in _OF_TRAINING else f"{key}:"


def refuse_plan(fault: Fault | None) -> None:
    """Raise PlanFileError where a plan has a fault."""
    refuse(fault, PlanFileError, plan_key)
