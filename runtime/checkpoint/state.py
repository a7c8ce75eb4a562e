"""What one rank keeps between steps, as tensors by name: what is saved of it, restored to it, or copied elsewhere.

`spreads` says of every tensor of the plan where it lies, the same on every rank; `live_tensors` gives this rank's own,
in place, so that whoever writes into them restores the rank.

    for spread in spreads(rank):
        if spread.shares is None and spread.held_at(rank.place.stage, rank.place.rank):
            live_tensors(rank)[spread.name]          has the elements spread.region(mesh, rank.place.rank)

Tables outside of the devices (`spread.shares`) have no memory of the rank's: `tables` reads and writes their rows.
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
    """What this rank keeps, by the names of a checkpoint: its own memory, not copies, of padded weights what the model
    has. What the optimizer keeps is there after the first update."""

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
    """All tensors of the state that the plan has after so many updates, as many as were made where nothing is said: the
    same on every rank."""
    made = rank.optimizer.updates if updates is None else updates
    contents = {name: rank.kept_buffers.content(name, rank.buffers) for name in rank.kept_buffers.homes}
    buffers = {
        name: (tuple(content.shape), dtype_name(content.dtype), rank.kept_buffers.homes[name])
        for name, content in contents.items()
    }
    return StateOfPlan(bound=rank.bound).tensors(rank.optimizer.moments, made, buffers)


def progress_of(rank: RankStep, data: Mapping[str, Any] | None = None) -> Progress:
    """How far a rank has come, with what the user keeps of the data's position: the same on every rank."""
    return Progress(
        step=rank.steps,
        updates=rank.optimizer.updates,
        samples=rank.samples,
        seed=rank.seed,
        data=None if data is None else dict(data),
        guard=rank.guard.state(),
    )


def start(rank: RankStep, steps: int, updates: int, samples: int) -> None:
    """Make room for a state after so many steps and updates, whose tensors are written next; `settle` follows."""
    rank.start_from(steps, samples)
    rank.optimizer.start(updates)
    if rank.asynchronous is not None:
        rank.asynchronous.start(steps)


def resume(rank: RankStep, progress: Progress) -> None:
    """Count on from some progress, with its seed and what its guard remembers, and make room for its state."""
    start(rank, progress.step, progress.updates, progress.samples)
    rank.seed = progress.seed
    rank.guard.load_state(progress.guard)


def settle(rank: RankStep, *, every_master: bool = False) -> None:
    """Derive what is not saved, after tensors were written: what weights were padded with, and the masters of weights
    that are wide themselves, or all of them."""
    for parameter in rank.parameters.values():
        _clear(rank, parameter.name, parameter.content, state=False)
    for _, name, tensor in rank.optimizer.kept():
        _clear(rank, name, tensor, state=True)
    for name, version in rank.asynchronous.earlier().items() if rank.asynchronous is not None else ():
        _clear(rank, name, version.piece, state=False)
    rank.scales.settle()
    rank.optimizer.settle(every_master)


def _clear(rank: RankStep, name: str, tensor: torch.Tensor, *, state: bool) -> None:
    """Set what the model does not have of a tensor of a padded weight to zero: no checkpoint has it, and memory that
    was made for it may hold anything."""
    parameter = rank.parameters[name]
    layout = parameter.stored.state if state else parameter.stored.weight
    clear(tensor.detach(), parameter.shape, parameter.own_shape, layout, rank.place)
