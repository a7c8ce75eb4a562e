"""Batches of a dataset for a plan: torch's DataLoader, with the samplers that a plan needs.

    full_batch=True     every rank reads the whole global batch; the step keeps its pieces
    full_batch=False    every rank reads only the samples of its pieces, micro-batch by micro-batch

Both train alike, bit by bit: the order of an epoch depends on the seed and the number of the epoch alone, and what
a dataset draws at random for a sample (from `random`, numpy or torch) on those and the number of the sample. So it does
not matter which rank reads a sample, in which worker, or how often. Ranks with the same samples read the same ones.

A plan takes whole global batches, so samples that are left over at the end of an epoch are left out.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from planner.errors import RequestError
from planner.plan.plan import Plan
from runtime.inputs import InputPieces, LocalBatch
from runtime.training_step import TrainingStep

Collate = Callable[[list[Any]], Any]

_SEED_STRIDE = 1_000_003  # a prime: seeds, epochs and samples do not meet in one stream below it


def loader(
    dataset: Dataset[Any],
    step: TrainingStep | Plan,
    *,
    shuffle: bool = False,
    seed: int = 0,
    full_batch: bool = True,
    drop_last: bool = True,
    workers: int = 0,
    collate: Collate | None = None,
    pin_memory: bool | None = None,
) -> "BatchLoader":
    """The batches of a dataset whose items are what the model takes, one sample each.

    A map-style dataset needs `__len__`; with a step it is read for an example, where the model has not been traced yet
    (collective then). An iterable one is read whole by every rank (`full_batch`), in its own order, and must give every
    rank the same items. Pinned memory is used where there is an accelerator, unless `pin_memory` says otherwise.

    Raises RequestError for a dataset that is shorter than one global batch, for samples that are left over with
    `drop_last=False`, and for what cannot be done with an iterable dataset or without a step.
    """
    plan = step if isinstance(step, Plan) else step.plan
    made = BatchLoader(
        dataset=dataset,
        plan=plan,
        seed=seed,
        shuffle=shuffle,
        workers=workers,
        collate=default_collate if collate is None else collate,
        pin_memory=torch.accelerator.is_available() if pin_memory is None else pin_memory,
        own=None,
    )
    _check(made, full_batch=full_batch, drop_last=drop_last, with_step=isinstance(step, TrainingStep))
    if isinstance(step, TrainingStep) and not made.iterable:
        if not step.ready:
            step.prepare(made.example())
        if not full_batch or not step.pieces.reads:  # a stage that reads no input reads nothing
            made.own = _Own(step=step, pieces=step.pieces)
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class _Own:
    """What this rank reads by itself."""

    step: TrainingStep
    pieces: InputPieces


@dataclass(kw_only=True)
class BatchLoader:
    """The global batches of one epoch after the other. Make it with `loader`.

    Iterating goes through one epoch: the same one again, until `set_epoch` says which. The first `start` batches of it
    are left out: unread, but of an iterable dataset.
    """

    dataset: Dataset[Any]
    plan: Plan
    seed: int
    shuffle: bool
    workers: int
    collate: Collate
    pin_memory: bool
    own: _Own | None
    epoch: int = 0
    start: int = 0

    @property
    def iterable(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    def __len__(self) -> int:
        """Global batches in an epoch. Raises TypeError for an iterable dataset, as torch's DataLoader does."""
        return len(self.dataset) // self.plan.training.global_batch  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Number of the epoch that is iterated next: another order where the samples are shuffled."""
        self.epoch, self.start = epoch, 0

    def go_on(self, samples: int) -> None:
        """Iterate next what follows after training on so many samples, epoch by epoch, under this plan or another: the
        rest of their epoch. Raises RequestError where they make no whole global batches."""
        size = self.plan.training.global_batch
        batches, over = divmod(samples, size)
        if over:
            raise RequestError(
                f"{samples} samples were trained on, which are no whole global batches of {size}; go on with a plan"
                f" whose --global-batch divides {samples}"
            )
        self.epoch, self.start = (0, batches) if self.iterable else divmod(batches, len(self))

    def __iter__(self) -> Iterator[Any]:
        """Whole batches as the dataset gives them, or a `LocalBatch` with this rank's pieces: a step takes both."""
        if self.own is not None:
            return self._local(self.own)
        if self.iterable:
            read = self._torch_loader(self.dataset, batch_size=self.plan.training.global_batch, drop_last=True)
            return islice(read, self.start, None)
        return iter(self._torch_loader(self._seeded(), batch_sampler=list(self._batches())))

    def steps(self, count: int) -> Iterator[Any]:
        """The batches of `count` steps of one epoch, those left out among them. Raises RequestError where there are
        fewer: at once for a map-style dataset, at the step for which nothing is left for an iterable one."""
        size = self.plan.training.global_batch
        if not self.iterable and len(self) < count:
            raise RequestError(
                f"{_samples_of(self.dataset)} make {len(self)} global batches of {size}, and {count} steps take"
                f" {count}; ask for {len(self)} steps, or give {count * size} samples"
            )
        return self._counted(count)

    def example(self) -> Any:
        """A batch of as many samples as the model was traced with, from the front of a map-style dataset."""
        count = self.plan.model.batch
        if count is None:
            raise RequestError(
                "the plan does not say with how many samples its model was traced; plan again, or prepare the step with"
                " the example of planning: step.prepare(*args)"
            )
        seeded = self._seeded()
        return self.collate([seeded[number] for number in range(min(count, len(seeded)))])

    def _counted(self, count: int) -> Iterator[Any]:
        batches, size = iter(self), self.plan.training.global_batch
        for number in range(self.start, count):
            batch = next(batches, None)
            if batch is None:
                raise RequestError(
                    f"the dataset ended in step {number + 1} of {count}: it has fewer than {(number + 1) * size}"
                    f" samples, and each step takes {size}; ask for {number} steps, or give {count * size} samples"
                )
            yield batch

    def _local(self, own: _Own) -> Iterator[LocalBatch]:
        """This rank's pieces of every micro-batch, read by itself."""
        parts, samples = self.plan.training.micro_batches, own.pieces.own
        if not samples:
            yield from (LocalBatch(parts=({},) * (parts * self.plan.slices)) for _ in self._batches())
            return
        size = self.plan.training.part
        order = [[b[part * size + at] for at in samples] for b in self._batches() for part in range(parts)]
        read = iter(self._torch_loader(self._seeded(), batch_sampler=order))
        for _ in range(len(order) // parts):
            pieces = []
            for _ in range(parts):
                batch = next(read)
                pieces.extend(own.pieces.of_samples(own.step.matcher.inputs((batch,), {})))
            yield LocalBatch(parts=tuple(pieces))

    def _batches(self) -> Iterator[list[int]]:
        """The samples of each global batch of the epoch."""
        size, count = self.plan.training.global_batch, len(self)
        order: Sequence[int] = range(len(self.dataset))  # type: ignore[arg-type]
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed * _SEED_STRIDE + self.epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        return (list(order[number * size : (number + 1) * size]) for number in range(self.start, count))

    def _seeded(self) -> "_Seeded":
        return _Seeded(dataset=self.dataset, seed=self.seed * _SEED_STRIDE + self.epoch)

    def _torch_loader(self, dataset: Any, **how: Any) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(self.seed * _SEED_STRIDE + self.epoch)  # of the workers' own seeds
        return DataLoader(
            dataset,
            num_workers=self.workers,
            collate_fn=self.collate,
            pin_memory=self.pin_memory,
            generator=generator,
            **how,
        )


def _check(made: BatchLoader, *, full_batch: bool, drop_last: bool, with_step: bool) -> None:
    size = made.plan.training.global_batch
    if made.iterable:
        if not full_batch or made.shuffle:
            asked = "shuffle=True" if full_batch else "full_batch=False"
            raise RequestError(
                f"{asked}: {type(made.dataset).__name__} is an iterable dataset, whose samples have no numbers; every"
                " rank reads it whole and in its own order, so leave that out, or give a map-style dataset"
            )
        return
    if not hasattr(made.dataset, "__len__"):
        raise RequestError(f"{type(made.dataset).__name__} has no __len__; a map-style dataset needs one")
    if not full_batch and not with_step:
        raise RequestError("full_batch=False: what a rank reads depends on its place; give the step, not its plan")
    if len(made) == 0:
        raise RequestError(
            f"{_samples_of(made.dataset)} make no global batch: the plan takes {size} in every step; give {size} or"
            " more, or plan for a smaller --global-batch"
        )
    over = len(made.dataset) % size
    if over and not drop_last:
        raise RequestError(
            f"drop_last=False: {_samples_of(made.dataset)} make {len(made)} global batches of {size} and leave {over},"
            " which a plan cannot take; leave them out, or fill the dataset up"
        )


def _samples_of(dataset: Dataset[Any]) -> str:
    count = len(dataset)  # type: ignore[arg-type]
    return f"the {count} samples of {type(dataset).__name__}"


@dataclass(frozen=True, kw_only=True)
class _Seeded(Dataset[Any]):
    """A dataset that draws the same for a sample whoever reads it. The generators of the process are left as they
    were."""

    dataset: Dataset[Any]
    seed: int

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, number: int) -> Any:
        seed = (self.seed * _SEED_STRIDE + number) % 2**32
        plain, array = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=[]):
            try:
                random.seed(seed)
                np.random.seed(seed)
                torch.manual_seed(seed)
                return self.dataset[number]
            finally:
                random.setstate(plain)
                np.random.set_state(array)
