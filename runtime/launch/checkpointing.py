"""The checkpoints of `plan run`: from which one it starts, and when it saves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from planner.errors import CheckpointError, RequestError
from planner.plan.words import replica_words
from planner.sharding.update import Update
from runtime.checkpoint.folder import incomplete, line, step_of
from runtime.checkpoint.restoring import Restored, name_in, open_together, restore
from runtime.checkpoint.saving import Checkpoints
from runtime.checkpoint.source import Readable, listed
from runtime.checkpoint.state_names import read_name, saved_ties
from runtime.processes.rank import At
from runtime.recovery.state_replicas import StateReplicas
from runtime.reference.unsharded import UnshardedStep
from runtime.run_settings import RunSettings
from runtime.step.step import RankStep
from runtime.step.training_step import TrainingStep

Position = Mapping[str, Any] | None
"""The position of a run in its dataset, as `BatchLoader.state`; None where it reads none."""


class RunCheckpoints:
    """The checkpoints of one run, and its state replicas in memory, if any. Every method is collective. `resumed` names
    the checkpoint from which the run continued, `saved` the last one that it saved; `position` is the data position in
    the loaded checkpoint, `loaded_step` its step; `notes` are messages for the user. With `only_model` the run makes no
    step, and loads only the model from any checkpoint."""

    def __init__(self, settings: RunSettings, at: At, *, only_model: bool = False) -> None:
        self._settings, self._at = settings, at
        self._only_model = only_model
        self.loaded_step = 0
        self.resumed: str | None = None
        self.position: Position = None
        self.saved: str | None = None
        self._last: Path | None = None  # the rollback target: the last checkpoint saved or resumed from
        self._own: Checkpoints | None = None
        self._replicated: tuple[str, ...] = ()
        if settings.save is not None:
            at("opening the checkpoints")
            self._own = Checkpoints(
                settings.save, keep=settings.keep, timeout=settings.timeout, lock=settings.lock, at=at
            )
        self._replicas = None
        if settings.state_replicas and self._own is not None:
            self._replicas = StateReplicas(self._own.origin)

    @property
    def notes(self) -> tuple[str, ...]:
        found = () if self._own is None else self._own.notes
        found += () if self._settings.resume is None else tuple(incomplete(Path(self._settings.resume)))
        found += () if self._replicas is None else self._replicas.notes
        found += self._replicated
        going_on = self._settings.go_on and self.resumed is not None
        return (*found, f"resuming from {self.resumed}") if going_on else found

    def restore(self, step: TrainingStep) -> Readable | None:
        """Load the checkpoint from which the run starts, and return it; None where there is none, or the run starts
        from state replicas in memory.

        Raises CheckpointError for a checkpoint that cannot be loaded, RequestError for one at or after the last step,
        with another seed, or without optimizer state to continue from.
        """
        settings = self._settings
        begins = settings.resume is not None or settings.weights is not None
        own = self._own.newest(may_start=begins) if settings.go_on and self._own is not None else None
        if self._from_replicas(step, own):
            return None
        path = own or settings.resume or settings.weights
        if path is None:
            return None
        at = self._at
        weights_only = self._only_model or (own is None and settings.resume is None)
        self._at(f"loading {path}")
        try:
            source = open_together(Path(path), step.plan.model, settings.model)
            if not weights_only:
                self._check(source)
                self._replicated = replica_notes(source, step.plan.training.update)
            cast = weights_only and settings.cast
            found: Restored = restore(step.rank, source, weights_only=weights_only, cast=cast, at=at)
        except CheckpointError as error:
            older = [one for one in line(own.parent) if step_of(one) < step_of(own)] if own is not None else []
            if not older:
                raise
            way = f"--resume {older[-1]} --save {settings.save}"
            raise CheckpointError(f"{error}; resume from the checkpoint before it with {way}") from error
        if self._own is not None and own is None and not weights_only:
            self._own.go_back(found.path)  # a restart before the next save must not continue what was abandoned
        self.loaded_step = 0 if source.manifest is None else source.manifest.progress.step
        head = f" without its head; {listed(found.initial)}: initial values, to be trained" if found.initial else ""
        self.resumed = f"the model in {found.path}{head}" if weights_only else f"{found.path}, step {found.step}"
        self.position = found.data
        self._last = None if weights_only else found.path
        return source

    def _from_replicas(self, step: TrainingStep, path: Path | None) -> bool:
        """Continue from state replicas in memory, unless they are older than the existing checkpoint; delete all other
        replicas."""
        if self._replicas is None:
            return False
        left = self._replicas.left() if self._settings.go_on else None
        saved = -1 if path is None else step_of(path)
        if left is None or not saved <= left.progress.step <= self._settings.steps:
            self._replicas.forget()
            return False
        self._at(f"loading state replicas of step {left.progress.step} in memory")
        self.position = self._replicas.restore(step, left).data
        self._replicas.forget(but=left.progress.step)
        self.resumed = f"state replicas in memory, step {left.progress.step}"
        return True

    def _check(self, source: Readable) -> None:
        settings, manifest = self._settings, source.manifest
        if manifest is None or manifest.kind == "merged":
            raise RequestError(
                f"--resume {source.path}: has weights but no optimizer states to resume from; start from its weights"
                f" with --weights {source.path}"
            )
        progress = manifest.progress
        if progress.step >= settings.steps:
            raise RequestError(
                f"{source.path} is of step {progress.step}, and --steps {settings.steps} counts from the start of"
                f" training; give --steps {progress.step + 1} or more"
            )
        if progress.seed != settings.seed:
            raise RequestError(
                f"--seed {settings.seed}: {source.path} was trained with seed {progress.seed}, which decides the order"
                f" of the data and dropout; give --seed {progress.seed}"
            )

    def save(self, step: TrainingStep, position: Position, *, leaving: bool = False) -> None:
        """Save after a step, with the data position, if the run saves at this step or is `leaving`; update the state
        replicas after every step."""
        due = step.steps % self._settings.save_every == 0 or step.steps == self._settings.steps
        if self._own is not None and (due or leaving):
            self._save(self._own, step, position)
        if self._replicas is not None:
            self._at(f"copying step {step.steps}")
            self._replicas.take(step, position)

    def _save(self, own: Checkpoints, step: TrainingStep, position: Position) -> None:
        self._at(f"saving step {step.steps}")
        self._last = own.save(step, position)
        self.saved = str(self._last)

    def save_start(self, step: TrainingStep) -> bool:
        """Save a checkpoint of the start, as a rollback target for the first steps; False where the run saves none."""
        if self._own is not None and self._last is None:
            self._save(self._own, step, self.position)
        return self._own is not None

    def go_back(self, step: TrainingStep) -> Readable:
        """Wait until the last checkpoint that this run saved or resumed from is whole, load it, and return it. Raises
        CheckpointError where it cannot be loaded."""
        assert self._own is not None, "the run saves"
        assert self._last is not None, "it has saved its start"
        self._own.wait()
        self._at(f"rolling back to {self._last}")
        source = open_together(self._last, step.plan.model, self._settings.model)
        restore(step.rank, source, at=self._at)
        if self._replicas is not None:
            self._replicas.forget()  # of later steps: a restart would continue from them
        return source

    def close(self) -> None:
        """Release the folder for other runs. State replicas stay in memory: a restart continues from them."""
        if self._own is not None:
            self._own.close()

    def wait(self) -> None:
        """Wait until the last checkpoint is whole; state replicas in memory are then no longer needed, and are
        deleted."""
        if self._own is not None:
            self._at("waiting for the last checkpoint")
            self._own.wait()
        if self._replicas is not None and self._settings.lock is None:
            self._replicas.close()
        elif self._replicas is not None:
            self._replicas.forget()  # the process that started the ranks holds the folder, and deletes it


def replica_notes(source: Readable, update: Update) -> tuple[str, ...]:
    """A message for a plan that continues from a checkpoint with other per-replica operators or another number of
    replicas: training continues, but it computes a different function of the batch."""
    was = ((), 1) if source.manifest is None else source.manifest.per_replica()
    now = (update.per_replica, update.replicas) if update.per_replica and update.replicas > 1 else ((), 1)
    if was == now:
        return ()
    options = " ".join(f"--per-replica '{name}={was[1]}'" for name in was[0])
    return (
        f"{source.path} was trained with {_batch_words(*was)}, and continues with {_batch_words(*now)}; to keep that,"
        f" plan {f'with {options}' if options else 'without --per-replica'}",
    )


def _batch_words(patterns: Sequence[str], count: int) -> str:
    if not patterns:
        return "every operator over the whole batch"
    return replica_words(Update(per_replica=tuple(patterns), replicas=count))


def restore_plain(plain: UnshardedStep, rank: RankStep, source: Readable, at: At = lambda what: None) -> None:
    """Load into the unsharded model the same state as into a rank; `at` is told of every tensor."""
    tied = {**source.tied, **saved_ties(rank.kept_buffers.tied)}

    def read(name: str) -> torch.Tensor | None:
        at(f"loading '{name}' into the unsharded model")
        found = name_in(source.tensors, name, tied)
        whole = rank.optimizer.updates or not read_name(name).of_optimizer
        return source.read(found) if whole and found in source.tensors else None

    plain.restore(read, rank.steps, rank.optimizer.updates)
    source.release()
