"""The way back of a run whose loss or gradients broke: to an earlier state, and on with the data behind the bad batch.

    batches   1  2  3  4  5  6  7  8  9 ..          batch 7 breaks; the last state that was kept is that after step 4
    steps     1  2  3  4  5  6  !
                          └──────── 5  6  ..        batches 5, 6 and 7 are never seen again

The state is the last checkpoint (`--save`), else a copy in the memory of each rank's host; both are taken every
`--save-every` steps, and where training starts. The position in the data does not go back: batches that came before a
spike are suspects too, and with them left out the same computation cannot fail in the same way. That is what was done
for PaLM (Chowdhery et al. 2022, arXiv 2204.02311, section 5.1), which went back about 100 steps and left out 200 to 500
batches. What follows is bit by bit what training without these batches gives. State replicas (`--state-replicas`) are
no way back: they are the state that the bad batch met, which a step that was not made has left as it was.

A rollback counts as one *in a row* until a step is made beyond the furthest one.
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
    """A copy of what one rank keeps between steps, in the memory of its host. `progress` is where it was taken."""

    def __init__(self, rank: RankStep) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self.take(rank)

    def take(self, rank: RankStep) -> None:
        """Copy the state as it is now, over the one from before."""
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
    """Keeps the states that a run can go back to, and goes back. Every method is collective.

    `plain` is the unsharded model beside it, on the rank that has one.
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
        """Keep the state after a step, where it is one behind which that is done; checkpoints are saved elsewhere."""
        if self._snapshot is not None and step.steps % self._settings.save_every == 0:
            self._snapshot.take(step.rank)
            self._plain = {} if plain is None else plain.kept()

    def go_back(self, step: TrainingStep, plain: UnshardedStep | None) -> None:
        """Go back, behind the batch that is in trouble. Raises the error of the trouble where there were too many
        rollbacks in a row, CheckpointError where the checkpoint cannot be loaded."""
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
                f"step {step.steps + 1}: {trouble.message}; after {allowed} rollbacks no step beyond {self._furthest}"
                " was made (--rollbacks): go on from an older checkpoint with --resume, look at the data behind sample"
                f" {step.rank.samples - step.plan.training.global_batch}, or leave such batches out with skip"
            )
