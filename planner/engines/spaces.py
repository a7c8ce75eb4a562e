"""All engines that a plan can be searched for, by name."""

from collections.abc import Mapping

from planner.engines.deepspeed import DEEPSPEED
from planner.engines.fsdp import ACCELERATE, TORCH, TORCHTITAN
from planner.engines.megatron import MEGATRON, MEGATRON_BRIDGE, NEMO
from planner.engines.mindspeed import MINDFORMERS, MINDSPEED
from planner.engines.space import EngineSpace
from planner.errors import RequestError, unknown_name

SPACES: Mapping[str, EngineSpace] = {
    space.name: space
    for space in (ACCELERATE, DEEPSPEED, MEGATRON, MEGATRON_BRIDGE, MINDFORMERS, MINDSPEED, NEMO, TORCH, TORCHTITAN)
}


def space_named(name: str) -> EngineSpace:
    """The space of an engine. Raises RequestError where there is none by that name."""
    if name == "mindspore":
        raise RequestError(
            "--for mindspore: it takes strategies operator by operator, so that any plan is one for it; leave out --for"
            " and write the plan with plan export --to mindspore"
        )
    if name not in SPACES:
        raise RequestError(f"--for: {unknown_name('engine', name, SPACES)}")
    return SPACES[name]


def space_and_stack(engine: str | None, software: str | None) -> tuple[EngineSpace | None, str | None]:
    """The space of the engine that is asked for, if one is, and the training stack: the engine's own unless another is
    given. Raises RequestError."""
    if engine is None:
        return None, software
    space = space_named(engine)
    return space, space.software if software is None else software
