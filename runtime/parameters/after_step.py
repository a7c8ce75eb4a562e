"""Buffers that change once per training step, outside of its forward passes: for example the biases of routers.

A module declares them by a method, which knows nothing of devices or plans:

    def after_step(self, buffers: Mapping[str, Tensor]) -> Mapping[str, Tensor]

It takes the module's own buffers and returns their contents after the optimizer's step. The statistics that the forward
passes collect for it are in buffers that they change, whole and equal on every rank, so each rank computes it alone.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn


@runtime_checkable
class ChangesAfterStep(Protocol):
    """A module with buffers that change after a step."""

    def after_step(self, buffers: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """One such module: its name, and the names of its buffers."""

    path: str
    module: ChangesAfterStep
    buffers: tuple[str, ...]

    def apply(self, buffers: MutableMapping[str, torch.Tensor]) -> None:
        """Change `buffers`, which has the model's names."""
        own = {name: buffers[self.full(name)] for name in self.buffers}
        with torch.no_grad():
            for name, content in self.module.after_step(own).items():
                buffers[self.full(name)] = content

    def full(self, name: str) -> str:
        """The name of a buffer in the model."""
        return f"{self.path}.{name}" if self.path else name


def step_ends(module: nn.Module) -> tuple[StepEnd, ...]:
    """The modules in `module` whose buffers change after a step."""
    own = {path: tuple(name for name, _ in each.named_buffers(recurse=False)) for path, each in module.named_modules()}
    return tuple(
        StepEnd(path=path, module=each, buffers=own[path])
        for path, each in module.named_modules()
        if isinstance(each, ChangesAfterStep)
    )
