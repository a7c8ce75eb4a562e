"""Rollback after a bad loss or gradient: back to an earlier state, and on with the data after the bad batch.

    batches   1  2  3  4  5  6  7  8  9 ..          batch 7 is bad; the last kept state is the one after step 4
    steps     1  2  3  4  5  6  !
                          └──────── 5  6  ..        batches 5, 6 and 7 are never used again

The state is the last checkpoint (`--save`), else a copy in the memory of each rank's host; both are taken every
`--save-every` steps, and at the start of training. The data position does not go back: batches before a spike are
suspect too, and without them the same computation cannot fail in the same way. This is what was done for PaLM
(Chowdhery et al. 2022, arXiv 2204.02311, section 5.1), which went back about 100 steps and left out 200 to 500 batches.
The result is bit-identical to training without these batches. State replicas (`--state-replicas`) cannot be rolled back
to: they hold the state to which the bad batch was applied, and a step that was not made has left that state unchanged.

A rollback counts as one *in a row* until a step beyond the furthest one is made.
"""

from collections.abc import Mapping

import torch

from runtime.checkpoint.manifest import Progress
from runtime.checkpoint.state import live_tensors, progress_of, resume, settle
from runtime.launch.checkpointing import RunCheckpoints, restore_plain
from runtime.reference.unsharded import UnshardedStep
from runtime.run_settings import RunSettings
from runtime.step.step import RankStep
from runtime.step.training_step import TrainingStep


class Snapshot:
    """A copy of one rank's state in the memory of its host. `progress` is the progress at which it was taken."""

    def __init__(self, rank: RankStep) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self.take(rank)

    def take(self, rank: RankStep) -> None:
        """Copy the current state, over the previous copy."""
        self.progress: Progress = progress_of(rank)
        found = {}
        for name, tensor in live_tensors(rank).items():
            known = self._tensors.get(name)
            found[name] = tensor.to("cpu", copy=True) if known is None else known.copy_(tensor)
        self._tensors = found

    @torch.no_grad()
    def restore(self, rank: RankStep) -> None:
        """Write it back."""
        resume(rank, self.progress)
        for name, tensor in live_tensors(rank).items():
            tensor.copy_(self._tensors[name])
        settle(rank)


class WayBack:
    """Keeps the states to which a run can roll back, and rolls back. Every method is collective.

    `plain` is the unsharded model, on the rank that has one.
    """

    def __init__(self, settings: RunSettings, checkpoints: RunCheckpoints) -> None:
        self._settings, self._checkpoints = settings, checkpoints
        self._snapshot: Snapshot | None = None
        self._plain: Mapping[str, torch.Tensor] = {}
        self._furthest, self._in_a_row = -1, 0

    def begin(self, step: TrainingStep, plain: UnshardedStep | None) -> None:
        """Keep the state in which training starts."""
        if not self._checkpoints.save_start(step):
            self._snapshot = Snapshot(step.rank)
            self._plain = {} if plain is None else plain.kept()

    def keep(self, step: TrainingStep, plain: UnshardedStep | None) -> None:
        """Keep the state after a step, if the run keeps it at this step; checkpoints are saved elsewhere."""
        if self._snapshot is not None and step.steps % self._settings.save_every == 0:
            self._snapshot.take(step.rank)
            self._plain = {} if plain is None else plain.kept()

    def go_back(self, step: TrainingStep, plain: UnshardedStep | None) -> None:
        """Roll back, and continue after the bad batch. Raises the error of the bad batch after too many rollbacks in a
        row, CheckpointError where the checkpoint cannot be loaded."""
        rank = step.rank
        samples = rank.samples
        self._count(step)
        if self._snapshot is None:
            source = self._checkpoints.go_back(step)
            if plain is not None:
                restore_plain(plain, rank, source)
        else:
            self._snapshot.restore(rank)
            if plain is not None:
                plain.restore(self._plain.get, rank.steps, rank.optimizer.updates)
        rank.start_from(rank.steps, samples)

    def _count(self, step: TrainingStep) -> None:
        trouble, allowed = step.trouble, self._settings.rollbacks
        assert trouble is not None, "a step was made"
        if step.steps > self._furthest:
            self._furthest, self._in_a_row = step.steps, 0
        self._in_a_row += 1
        if self._in_a_row > allowed:
            raise trouble.error(
                f"step {step.steps + 1}: {trouble.message}; {allowed} rollbacks made no progress beyond step"
                f" {self._furthest} (--rollbacks): resume from an older checkpoint with --resume, look at the data"
                f" after sample {step.rank.samples - step.plan.training.global_batch}, or skip such batches"
            )
