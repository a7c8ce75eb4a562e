"""A real pipeline in which one rank leaves a step in the middle, and ends."""

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from planner.errors import RunError
from tests.distributed import plans
from tests.distributed.tasks import build_step, plan_of


def aborted(model: str, settings: dict[str, Any], failing: int, passes: int) -> tuple[str, str, str]:
    """What leaves the second step, and what a third one and an evaluation say. On the rank `failing` the pass after so
    many raises, and the process ends when it has seen the same of a third step (with 0, else 1)."""
    step = build_step(model, plan_of(model, plans.mesh_of(1), 0, stages=(1, 1), **settings))
    batch = plans.inputs(model)
    step(*batch)
    if dist.get_rank() == failing:
        step.rank.compute = _failing(step.rank.compute, passes)  # type: ignore[method-assign]
    said = tuple(_error(call, batch) for call in (step, step, step.evaluate))
    if dist.get_rank() == failing:
        sound = said[0] == "MemoryError: no room" and "aborted by MemoryError: no room." in said[1]
        os._exit(0 if sound else 1)
    return said


def _failing(sound: Callable[..., Any], passes: int) -> Callable[..., Any]:
    made = 0

    def broken(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        if made > passes:
            raise MemoryError("no room")
        return sound(*args, **kwargs)

    return broken


def _error(call: Callable[..., Any], batch: tuple[object, ...]) -> str:
    try:
        call(*batch)
    except (MemoryError, RunError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
