"""The checkpoints of `plan run`: where it starts from, and when it saves."""

from pathlib import Path

import torch

from planner.errors import RequestError
from runtime.checkpoint.restoring import Restored, name_in, open_together, restore
from runtime.checkpoint.saving import Checkpoints
from runtime.checkpoint.source import Source
from runtime.rank import At
from runtime.run_settings import RunSettings
from runtime.step import RankStep
from runtime.training_step import TrainingStep
from runtime.unsharded import UnshardedStep


class RunCheckpoints:
    """Those of one run. Every method is collective. `resumed` and `saved` name what it went on from, and the last that
    it has saved."""

    def __init__(self, settings: RunSettings, at: At) -> None:
        self._settings, self._at = settings, at
        self.resumed: str | None = None
        self.saved: str | None = None
        self._own: Checkpoints | None = None
        if settings.save is not None:
            at("opening the checkpoints")
            self._own = Checkpoints(settings.save, keep=settings.keep, timeout=settings.timeout)

    def restore(self, step: TrainingStep) -> Source | None:
        """Load what the run starts from, and return it; None where that is nothing.

        Raises CheckpointError for what cannot be loaded, RequestError for a checkpoint behind the last step, of another
        seed, or without a state to go on from.
        """
        settings, path = self._settings, self._start()
        if path is None:
            return None
        self._at(f"loading {path}")
        source = open_together(path)
        if settings.weights is None:
            self._check(source)
        found: Restored = restore(step.rank, source, weights_only=settings.weights is not None, cast=settings.cast)
        self.resumed = f"{found.path}, step {found.step}" if settings.weights is None else f"the model in {found.path}"
        return source

    def _start(self) -> Path | None:
        settings = self._settings
        if settings.go_on and self._own is not None:
            return self._own.newest()
        given = settings.resume if settings.resume is not None else settings.weights
        return None if given is None else Path(given)

    def _check(self, source: Source) -> None:
        settings, manifest = self._settings, source.manifest
        if manifest is None or manifest.kind == "merged":
            raise RequestError(
                f"--resume {source.path}: has a model and no state of an optimizer to go on from; start from it with"
                f" --weights {source.path}"
            )
        progress = manifest.progress
        if progress.step >= settings.steps:
            raise RequestError(
                f"{source.path} is of step {progress.step}, and --steps {settings.steps} counts those before it too;"
                f" give --steps {progress.step + 1} or more"
            )
        if progress.seed != settings.seed:
            raise RequestError(
                f"--seed {settings.seed}: {source.path} was trained with seed {progress.seed}, which decides the order"
                f" of the data and what is dropped; give --seed {progress.seed}"
            )

    def save(self, step: TrainingStep) -> None:
        """Save after a step, where it is one behind which the run saves."""
        due = step.steps % self._settings.save_every == 0 or step.steps == self._settings.steps
        if self._own is not None and due:
            self._at(f"saving step {step.steps}")
            self.saved = str(self._own.save(step))

    def wait(self) -> None:
        """Wait until the last checkpoint is whole."""
        if self._own is not None:
            self._at("waiting for the last checkpoint")
            self._own.wait()


def restore_plain(plain: UnshardedStep, rank: RankStep, source: Source) -> None:
    """Give the unsharded model what a rank has been given."""
    tied = {**source.tied, **rank.kept_buffers.tied}

    def read(name: str) -> torch.Tensor | None:
        found = name_in(source.tensors, name, tied)
        whole = rank.optimizer.updates or not name.startswith("optimizer/")
        return source.read(found) if whole and found in source.tensors else None

    plain.restore(read, rank.steps, rank.optimizer.updates)
    source.release()
