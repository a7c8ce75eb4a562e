"""The state that one rank keeps between steps, as tensors by name, to be saved, restored or copied.

`spreads` says where every tensor of the plan lies, the same on every rank; `live_tensors` gives this rank's own tensors
in place, so writing into them restores the rank.

    for spread in spreads(rank):
        if spread.shares is None and spread.held_at(rank.place.stage, rank.place.rank):
            live_tensors(rank)[spread.name]          has the elements spread.region(mesh, rank.place.rank)

Tables off the devices (`spread.shares`) are not in the rank's memory: `tables` reads and writes their rows.
"""

from collections.abc import Mapping
from typing import Any

import torch

from runtime.checkpoint.manifest import Progress
from runtime.checkpoint.spread import Spread, StateOfPlan
from runtime.checkpoint.state_names import kept_name, own_name, previous_name, saved_name, scales_name
from runtime.checkpoint.tensor_files import dtype_name
from runtime.parameters.padding import clear
from runtime.step.step import RankStep


def live_tensors(rank: RankStep) -> dict[str, torch.Tensor]:
    """The state of this rank, by the names of a checkpoint: its own memory, not copies; for padded weights only the
    part that is in the model. Optimizer states exist after the first update."""

    def own(name: str, tensor: torch.Tensor, *, state: bool = False) -> torch.Tensor:
        parameter = rank.parameters[name]
        layout = parameter.stored.state if state else parameter.stored.weight
        return parameter.in_model(tensor, layout, rank.place)

    found = {_own(rank, name): own(name, parameter.content) for name, parameter in rank.parameters.items()}
    for kind, name, tensor in rank.optimizer.kept():
        found[kept_name(kind, _own(rank, name))] = own(name, tensor.detach(), state=True)
    if rank.asynchronous is not None:
        for name, version in rank.asynchronous.earlier().items():
            found[previous_name(_own(rank, name))] = own(name, version.piece.detach())
    found.update((scales_name(saved_name(name)), rank.scales.history_of(name)) for name in rank.scales.names)
    found.update((saved_name(name), rank.kept_buffers.content(name, rank.buffers)) for name in rank.kept_buffers.homes)
    return found


def _own(rank: RankStep, name: str) -> str:
    saved = saved_name(name)
    return own_name(saved, rank.place.rank) if rank.parameters[name].local else saved


def spreads(rank: RankStep, updates: int | None = None) -> list[Spread]:
    """All tensors of the plan's state after a number of `updates` (by default as many as were made): the same on every
    rank."""
    made = rank.optimizer.updates if updates is None else updates
    contents = {name: rank.kept_buffers.content(name, rank.buffers) for name in rank.kept_buffers.homes}
    buffers = {
        name: (tuple(content.shape), dtype_name(content.dtype), rank.kept_buffers.homes[name])
        for name, content in contents.items()
    }
    return StateOfPlan(bound=rank.bound).tensors(rank.optimizer.moments, made, buffers)


def progress_of(rank: RankStep, data: Mapping[str, Any] | None = None) -> Progress:
    """The progress of a rank, with the user's data position: the same on every rank."""
    return Progress(
        step=rank.steps,
        updates=rank.optimizer.updates,
        samples=rank.samples,
        seed=rank.seed,
        data=None if data is None else dict(data),
        guard=rank.guard.state(),
    )


def start(rank: RankStep, steps: int, updates: int, samples: int) -> None:
    """Allocate the state after these steps and updates; its tensors are written next, and then `settle` is called."""
    rank.start_from(steps, samples)
    rank.optimizer.start(updates)
    if rank.asynchronous is not None:
        rank.asynchronous.start(steps)


def resume(rank: RankStep, progress: Progress) -> None:
    """Continue from some progress, with its seed and its guard's state, and allocate the state."""
    start(rank, progress.step, progress.updates, progress.samples)
    rank.seed = progress.seed
    rank.guard.load_state(progress.guard)


def settle(rank: RankStep, *, every_master: bool = False) -> None:
    """Compute what is not saved, after tensors were written: the padding of weights, and the masters of weights that
    are wide themselves, or all masters."""
    for parameter in rank.parameters.values():
        _clear(rank, parameter.name, parameter.content, state=False)
    for _, name, tensor in rank.optimizer.kept():
        _clear(rank, name, tensor, state=True)
    for name, version in rank.asynchronous.earlier().items() if rank.asynchronous is not None else ():
        _clear(rank, name, version.piece, state=False)
    rank.scales.settle()
    rank.optimizer.settle(every_master)


def _clear(rank: RankStep, name: str, tensor: torch.Tensor, *, state: bool) -> None:
    """Set the padding of a tensor of a padded weight to zero: no checkpoint has it, and newly allocated memory may hold
    anything."""
    parameter = rank.parameters[name]
    layout = parameter.stored.state if state else parameter.stored.weight
    clear(tensor.detach(), parameter.shape, parameter.own_shape, layout, rank.place)
