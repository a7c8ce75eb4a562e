"""Loads a checkpoint into a training step, whatever plan it was written under.

First sizes and checksums, each file checked by one rank; then names, shapes and dtypes; then every rank reads the boxes
that it holds. If one of the first two checks fails, nothing has been changed, and all ranks raise the same error.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from planner.errors import CheckpointError
from planner.models.naming.adapters import is_of_adapter
from planner.plan.plan import ModelReference, Plan
from runtime.checkpoint.fused import as_in_graph, opened_in_module
from runtime.checkpoint.manifest import Manifest, Progress, SavedTensor
from runtime.checkpoint.naming import in_own_names
from runtime.checkpoint.regions import Region
from runtime.checkpoint.renamed import initial_in
from runtime.checkpoint.source import Readable, listed, located
from runtime.checkpoint.spread import Spread, between_places
from runtime.checkpoint.state import live_tensors, resume, settle, spreads, start
from runtime.checkpoint.state_names import BESIDE, MASTER, PREVIOUS, SCALES, read_name, saved_ties
from runtime.checkpoint.tables import fill_tables
from runtime.checkpoint.tensor_files import dtype_of
from runtime.checkpoint.together import said_by_first, together
from runtime.comm.exchange import rank_number, world
from runtime.processes.rank import At
from runtime.step.step import RankStep
from runtime.step.training_step import TrainingStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a checkpoint says beside its tensors: the steps and samples of training, the seed, and the data position
    that the user saved; 0 and None where only a model was loaded. `initial` are tensors of a head that the files of a
    model lack: they keep their initial values."""

    path: Path
    step: int
    samples: int
    seed: int | None
    data: Mapping[str, Any] | None
    initial: tuple[str, ...] = ()


def load(
    step: TrainingStep,
    path: Path,
    *,
    model: str | None = None,
    weights_only: bool = False,
    cast: bool = False,
    verify: bool = True,
    at: At = lambda what: None,
) -> Restored:
    """`restore` from the checkpoint at a path (the newest one of a folder with several); `model` as in `open_together`.
    Collective."""
    rank = step.rank
    source = open_together(path, rank.bound.plan.model, model)
    return restore(rank, source, weights_only=weights_only, cast=cast, verify=verify, at=at)


def restore(
    rank: RankStep,
    source: Readable,
    *,
    weights_only: bool = False,
    cast: bool = False,
    verify: bool = True,
    at: At = lambda what: None,
) -> Restored:
    """Write a checkpoint into a rank. Collective. With `weights_only`, and from files that contain only a model, the
    model alone is loaded: training then starts at step 0, and with `cast` floating point numbers are converted to the
    plan's dtypes. `verify` reads all files once, for their checksums. `at` is told of every block and tensor that is
    read.

    Raises CheckpointError, on every rank, where a file is not what was written, or names, shapes or dtypes differ.
    """
    if verify:
        share = partial(source.check, lambda number: number % world() == rank_number())
        together(lambda: share(lambda: at(f"verifying {source.path}")))
    manifest = source.manifest
    if manifest is None or manifest.kind == "merged" or weights_only:
        _fill(rank, source, None, at, cast)
        return Restored(path=source.path, step=0, samples=0, seed=None, data=None, initial=initial_in(source))
    check_optimizer(source.path, manifest, rank.bound.plan)
    found = manifest.progress
    _fill(rank, source, found, at)
    return Restored(path=source.path, step=found.step, samples=found.samples, seed=found.seed, data=found.data)


def _fill(rank: RankStep, source: Readable, progress: Progress | None, at: At, cast: bool = False) -> None:
    """Write all tensors of the state at some progress, or of the model alone where `progress` is None."""
    source = as_in_graph(source, rank.bound.graph.cuts)
    updates = 0 if progress is None else progress.updates
    wanted, found = spreads(rank, updates), dict(source.tensors)
    if progress is None:
        wanted = [spread for spread in wanted if not spread.name.startswith(BESIDE)]
        found = {name: tensor for name, tensor in found.items() if not name.startswith(BESIDE)}
        wanted = [spread for spread in wanted if spread.name not in initial_in(source)]
        if not any(map(is_of_adapter, found)):  # from a model alone: adapters keep their initial values
            wanted = [spread for spread in wanted if not is_of_adapter(spread.name)]
    tied = {**source.tied, **saved_ties(rank.kept_buffers.tied)}
    names = {spread.name: name_in(found, spread.name, tied) for spread in wanted}
    there = frozenset[str]() if source.manifest is None else source.manifest.tables_outside()
    promised, found = in_both_places(wanted, names, found, rank.tables.names, there)
    check_same(source.path, as_found(promised, names, found, cast=cast), names, found, tied)
    new = {spread.name for spread in wanted} - {spread.name for spread in promised}

    def one(name: str, region: Region | None = None, into: torch.Tensor | None = None) -> torch.Tensor:
        at(f"loading '{name}' of {source.path}")
        return source.read(name, region, into)

    def read() -> None:
        live = live_tensors(rank)
        for spread in wanted:
            if spread.shares is not None:
                continue
            if spread.name in new and spread.held_at(rank.place.stage, rank.place.rank):
                live[spread.name].zero_()
            elif spread.held_at(rank.place.stage, rank.place.rank):
                region = spread.region(rank.place.mesh, rank.place.rank)
                one(names[spread.name], region, into=live[spread.name])

    if progress is None:
        start(rank, 0, 0, 0)
    else:
        resume(rank, progress)
    with torch.no_grad():
        together(read)
    source.release()
    tables = [spread for spread in promised if spread.shares is not None]
    if rank.tables.names:
        together(lambda: fill_tables(rank, tables, rank.optimizer.updates, names, one))
        source.release()
    settle(rank, every_master=progress is None)


def in_both_places(
    wanted: Sequence[Spread],
    names: Mapping[str, str],
    found: Mapping[str, SavedTensor],
    here: Collection[str],
    there: Collection[str],
) -> tuple[list[Spread], dict[str, SavedTensor]]:
    """The wanted tensors that were saved, and the saved tensors that are wanted, without those that a table keeps only
    on the devices or only off them (`between_places`): those start as zeros, or are not read."""
    asked = set(names.values())
    return (
        [s for s in wanted if names[s.name] in found or not between_places(s.name, here, there)],
        {name: one for name, one in found.items() if name in asked or not between_places(name, here, there)},
    )


def name_in(found: Mapping[str, SavedTensor], name: str, tied: Mapping[str, str]) -> str:
    """The name under which a tensor was saved: for tied weights another of their names; for weights of one update ago,
    which only some schedules have, the name of the weight."""
    if name in found:
        return name
    if name.startswith(f"{PREVIOUS}/"):
        return name_in(found, name.removeprefix(f"{PREVIOUS}/"), tied)
    return next((alias for alias, first in tied.items() if first == name and alias in found), name)


def as_found(
    wanted: Iterable[Spread], names: Mapping[str, str], found: Mapping[str, SavedTensor], *, cast: bool = False
) -> list[Spread]:
    """The wanted tensors, with the saved dtype where the values are converted while they are read: always for moments,
    which plans keep in several dtypes, and for weights where they are `cast`."""
    converted = (cast or _is_moment(spread.name) for spread in wanted)
    return [
        _as_saved(spread, found.get(names[spread.name])) if change else spread
        for spread, change in zip(wanted, converted, strict=True)
    ]


def _is_moment(name: str) -> bool:
    kept = read_name(name)
    return kept.of_optimizer and kept.kind != MASTER


def _as_saved(spread: Spread, tensor: SavedTensor | None) -> Spread:
    """Tensors with floating point numbers in the dtype in which they were saved."""
    if tensor is None or not all(dtype_of(one.dtype).is_floating_point for one in (spread, tensor)):
        return spread
    return replace(spread, dtype=tensor.dtype)


def check_optimizer(path: Path, manifest: Manifest, plan: Plan) -> None:
    """Raise CheckpointError where a checkpoint has the states of another optimizer than the plan's."""
    wanted = plan.training.optimizer
    if manifest.optimizer != wanted:
        raise CheckpointError(
            f"{path}: has optimizer states of {manifest.optimizer}, but the plan trains with {wanted}; plan with"
            f" --optimizer {manifest.optimizer}, or load the weights alone"
        )


def check_same(
    path: Path,
    wanted: Iterable[Spread],
    names: Mapping[str, str],
    found: Mapping[str, SavedTensor],
    tied: Mapping[str, str],
    lacking: Iterable[str] = (),
) -> None:
    """Raise CheckpointError that lists all differences between the tensors that a plan wants (`names` are their saved
    names) and those of a checkpoint; `lacking` is already known to be missing."""
    missing, shapes, dtypes, used = list(lacking), [], [], set()
    steps = set[int]()  # lengths of FP8 histories that differ
    for spread in wanted:
        name = names[spread.name]
        tensor = found.get(name)
        used.add(name)
        if tensor is None:
            missing.append(spread.name)
        elif tensor.shape != spread.shape:
            shapes.append(f"{spread.name} {list(tensor.shape)}, not {list(spread.shape)}")
            steps |= {tensor.shape[-1]} if spread.name.startswith(f"{SCALES}/") else set()
        elif tensor.dtype != spread.dtype:
            dtypes.append(f"{spread.name} {tensor.dtype}, not {spread.dtype}")
    free = (name for name in found if not name.startswith(f"{PREVIOUS}/") and name not in tied)
    unexpected = sorted(set(free) - used)
    kinds = {"it lacks": missing, "not in the model": unexpected, "other shape": shapes, "other dtype": dtypes}
    if any(kinds.values()):
        said = "; ".join(f"{kind}: {listed(names)}" for kind, names in kinds.items() if names)
        advice = "" if missing or unexpected or shapes else "; weights alone can be converted: --weights PATH --cast"
        if len(steps) == 1 and not (missing or unexpected):
            (length,) = steps
            advice = f"; delayed scales were made from {length} steps: plan with --fp8-history {length}"
        raise CheckpointError(f"{path}: does not fit this model: {said}{advice}")


def open_together(path: Path, model: ModelReference, given: str | None) -> Readable:
    """The checkpoint at a path, under the tensor names of a plan's model. All ranks open the same one, although a newer
    one may become whole meanwhile. `given` is the config of the model, for a model that is not in the zoo. Collective.
    Raises CheckpointError on every rank."""
    found = said_by_first(lambda: str(located(path)), str)
    opened: list[Readable] = []
    together(lambda: opened.append(in_own_names(opened_in_module(Path(found)), model, given)))
    return opened[0]
