"""The buffers in a model's state: persistent ones, and all that change in training.

A buffer that forward passes change, or that changes after a step (`runtime.parameters.after_step`), is valid only on
the pipeline ranks whose stages change it; all others are equal everywhere. Persistent buffers are kept even if no
operator reads them, so that a plain module finds all of its state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.stage_cut import StageCut
from runtime.parameters.after_step import step_ends
from runtime.parameters.initial_values import from_first


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBuffers:
    """`homes` has the pipeline ranks on which each buffer is valid, in sorted order of names; `unread` the contents of
    buffers that no operator reads; `tied` the other names of shared parameters, each with its name in the plan."""

    homes: Mapping[str, tuple[int, ...]]
    unread: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]

    def content(self, name: str, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The content of a buffer, one that a step reads (from `buffers`) or another one."""
        return buffers[name] if name in buffers else self.unread[name]


def kept_buffers(module: nn.Module, bound: BoundPlan, cuts: Sequence[StageCut], device: torch.device) -> KeptBuffers:
    """The kept buffers of a module under a plan. Collective where the plan broadcasts values."""
    graph, homes = bound.graph, buffer_homes(module, bound, cuts)
    held = dict(module.named_buffers(remove_duplicate=False))
    unread = {name: held[name].detach() for name in homes if name not in graph.buffers}
    if bound.plan.training.update.broadcast:
        unread = {name: from_first(content, device) for name, content in unread.items()}
    return KeptBuffers(
        homes=homes,
        unread={name: content.to(device, copy=True) for name, content in unread.items()},
        tied=_tied(module, graph.parameter_names),
    )


def buffer_homes(module: nn.Module, bound: BoundPlan, cuts: Sequence[StageCut]) -> dict[str, tuple[int, ...]]:
    """The pipeline ranks on which each kept buffer is valid, in sorted order of names."""
    homes: dict[str, tuple[int, ...]] = {name: tuple(range(bound.plan.pipeline)) for name in _persistent(module)}
    changed = dict(bound.graph.updates)
    for buffer, content in changed.items():
        at = bound.graph.producer[content]
        homes[buffer] = tuple(sorted({bound.plan.rank_of(cut.stage) for cut in cuts if at in cut.operators}))
    for end in step_ends(module):
        names = [end.full(name) for name in end.buffers]
        for name in changed:
            if name in names:
                homes.update(dict.fromkeys(names, homes[name]))
    return dict(sorted(homes.items()))


def _persistent(module: nn.Module) -> list[str]:
    """Buffers in the module's state dict."""
    return [
        f"{path}.{name}" if path else name
        for path, each in module.named_modules()
        for name, content in each._buffers.items()
        if content is not None and name not in each._non_persistent_buffers_set
    ]


def _tied(module: nn.Module, known: frozenset[str]) -> dict[str, str]:
    """Names of parameters that the plan knows under another name."""
    every = dict(module.named_parameters(remove_duplicate=False))
    first = {id(every[name]): name for name in sorted(known) if name in every}
    return {name: first[id(weight)] for name, weight in every.items() if name not in known and id(weight) in first}
