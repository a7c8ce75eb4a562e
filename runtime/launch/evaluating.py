"""Evaluation in a run: on validation data, and of forward-only plans.

    train ── step N, 2N, ... ──> validation: all whole batches of --evaluate, forward only ──> one report
    a forward-only plan          the same, or batch by batch on --dataset or synthetic data; no training step is made

Batches have equal size, so the mean over batches is the mean over samples, and over tokens where no labels are ignored:
a loss that is a mean over labels is one for each micro-batch, and these count equally. A plan takes whole global
batches, so the samples after the last one are left out, and the report says how many.
"""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist

from planner.plan.plan import PRECISIONS
from runtime.data.datasets import evaluation_batches
from runtime.data.loading import BatchLoader
from runtime.processes.progress import EvaluationReport
from runtime.processes.rank import At
from runtime.reference.unsharded import UnshardedStep
from runtime.run_settings import RunSettings
from runtime.step.arguments import Arguments
from runtime.step.training_step import TrainingStep


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Evaluates the model of a run. `own` has the batches of this rank; `full` the whole batches, where the unsharded
    model needs other ones (only the first rank has it, as `plain`). `compares` says whether any rank has it."""

    settings: RunSettings
    step: TrainingStep
    plain: UnshardedStep | None
    compares: bool
    own: BatchLoader
    full: BatchLoader | None

    def due(self, number: int) -> bool:
        """Whether the model is evaluated after step `number`."""
        every = self.settings.evaluate_every
        return number == self.settings.steps or (every is not None and number % every == 0)

    def report(self, number: int, at: At) -> EvaluationReport:
        """Evaluate the model as it is after step `number`. Collective."""
        at(f"evaluating after step {number}")
        losses, plain_losses, seconds = [], [], 0.0
        for count, (call, whole) in enumerate(itertools.islice(self._batches(), self.settings.evaluate_batches), 1):
            at(f"evaluating batch {count} after step {number}")  # all batches may take longer than --timeout
            if self.compares and dist.is_initialized():
                dist.barrier()  # the others are ahead of the first rank, which runs two models
            started = time.perf_counter()
            losses.append(self.step.evaluate(*call.args, **call.kwargs))
            seconds += time.perf_counter() - started
            if self.plain is not None:
                plain_losses.append(unsharded_loss(self.step, self.plain, whole))
        samples = len(losses) * self.step.plan.training.global_batch
        length = self.step.plan.model.sequence_length
        return EvaluationReport(
            step=number,
            data=str(self.settings.evaluate),
            loss=sum(losses) / max(1, len(losses)),
            unsharded=sum(plain_losses) / len(plain_losses) if plain_losses else None,
            seconds=seconds,
            batches=len(losses),
            samples=samples,
            tokens=None if length is None else samples * length,
            left_out=None if self.own.iterable else len(self.own.dataset) - samples,  # type: ignore[arg-type]
        )

    def _batches(self) -> Iterator[tuple[Arguments, Arguments]]:
        """This rank's inputs, and the whole batch where it is known here."""
        own = map(_one, self.own)
        return ((call, call) for call in own) if self.full is None else zip(own, map(_one, self.full), strict=True)


def validation_of(
    settings: RunSettings, step: TrainingStep, plain: UnshardedStep | None, *, compares: bool
) -> Validation | None:
    """The validation of a run, if requested. Raises RequestError for anything that is not a dataset."""
    if settings.evaluate is None:
        return None
    dtype = PRECISIONS[step.plan.training.precision]
    own, full = evaluation_batches(settings, step, dtype=dtype, whole=plain is not None)
    return Validation(settings=settings, step=step, plain=plain, compares=compares, own=own, full=full)


def unsharded_loss(step: TrainingStep, plain: UnshardedStep, whole: Arguments) -> float:
    """The unsharded model's loss of a batch, in evaluation mode."""
    given = step.matcher.arguments(whole.args, whole.kwargs)
    moved = given.with_tensors([tensor.to(step.place.device) for tensor in given.tensors()])
    return plain.evaluate(moved.args, moved.kwargs)


def _one(batch: object) -> Arguments:
    return Arguments(args=(batch,), kwargs={})
